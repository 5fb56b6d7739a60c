"""Files of templates through the queue: the order of their jobs, kills, and wrong fingerprints."""

import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.client.bulk.support import (
    BulkSetup,
    Interrupted,
    completion,
    interrupt_after,
    names,
    write,
)
from tests.client.bulk.test_imports import WINDOW, begin, go_on
from tests.client.bulk.test_prefix_order import shuffled, template, templated
from tests.support.worker import running_worker
from tokenmill import Client
from tokenmill.bulk import BatchState, BatchStore, cancel_batch, import_batch, pending_lines
from tokenmill.bulk.formats.input_file import line_of
from tokenmill_schemas.job import JobRequest, Priority
from tokenmill_schemas.keys import Keys

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


@pytest.fixture
def no_worker(allowed_keys: list[str]) -> None:
    allowed_keys.append("tm:{q}:*")


def queued_lines(redis_url: str, batch_id: str) -> list[int]:
    with redis.Redis.from_url(redis_url) as server:
        entries = server.xrange(Keys("q").tenant_stream(Priority.BULK))
    return [line_of(batch_id, fields[b"job"].decode()) for _, fields in entries]


@pytest.mark.usefixtures("no_worker")
def test_jobs_wait_in_the_queue_template_by_template(
    client: Client, redis_url: str, database: str, tmp_path: Path
) -> None:
    setup = BulkSetup(tmp_path, redis_url, database)
    kinds = shuffled(tmp_path / "in.jsonl", templates=5, lines=60)
    batch = setup.do(lambda client, store: import_batch(client, store, tmp_path / "in.jsonl"))
    lines = queued_lines(redis_url, batch.id)
    assert sorted(lines) == list(range(1, 61))
    assert len(list(groupby(kinds[line - 1] for line in lines))) == 5
    setup.do(lambda client, store: cancel_batch(client, store, batch.id))


@pytest.mark.usefixtures("no_worker")
def test_a_resumed_import_repeats_the_order_and_a_cancelled_one_leaves_no_job(
    any_client: Client, store: BatchStore, tmp_path: Path, redis_url: str
) -> None:
    path = write(tmp_path / "in.jsonl", [templated(f"{n}", n // 3 % 4) for n in range(60)])
    batch = begin(any_client, store, path)
    for _ in range(2):  # of the first template, up to line 38
        assert queued_lines(redis_url, batch.id) == [1, 2, 3, 13, 14, 15, 25, 26, 27, 37]
        assert (any_client.depth().num_queued, batch.submitted) == (WINDOW, 3)
        batch = go_on(any_client, store, path, batch)
    cancel_batch(any_client, store, batch.id)
    assert any_client.depth().num_queued == 0


@pytest.mark.parametrize("is_grouped", [True, False])
async def test_a_template_is_computed_once_by_a_cache_that_holds_four_of_them(
    is_grouped: bool,
    redis_url: str,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_grouped:
        monkeypatch.setattr(pending_lines, "fingerprint", lambda _: ())
    draw, num_templates, lines = random.Random("ids"), 20, 200
    templates = [[draw.randrange(256) for _ in range(512)] for _ in range(num_templates)]
    kinds = [number % num_templates for number in range(lines)]
    draw.shuffle(kinds)
    rows = [[draw.randrange(256) for _ in range(16)] for _ in kinds]
    prompts = [templates[kind] + row for kind, row in zip(kinds, rows, strict=True)]
    path = write(tmp_path / "in.jsonl", [completion(f"{n}", ids) for n, ids in enumerate(prompts)])
    setup = BulkSetup(tmp_path, redis_url, database)
    async with running_worker(redis_url, database, max_num_seqs=2):  # 2 × 65 blocks of 16 tokens
        totals = (await setup.run(path)).totals
    assert totals.completed == lines
    computed = (totals.input_tokens - totals.cached_tokens) / (512 * num_templates + 16 * lines)
    assert computed <= 1.1 if is_grouped else computed > 4


@pytest.mark.parametrize("has_sessions", [True, False])
async def test_of_two_workers_one_computes_a_template(
    has_sessions: bool,
    redis_url: str,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_sessions:
        monkeypatch.setattr(pending_lines, "shared_beginnings", lambda lines: [b""] * len(lines))
    num_templates, lines, words = 16, 256, 150
    setup = BulkSetup(tmp_path, redis_url, database)
    draw = random.Random("two workers")
    kinds = [number % num_templates for number in range(lines)]
    draw.shuffle(kinds)
    texts = [template(kind, words) + f" row {place}" for place, kind in enumerate(kinds)]
    path = write(tmp_path / "in.jsonl", [completion(f"{n}", text) for n, text in enumerate(texts)])
    model = "synthetic?step_ms=5&token_us=20&length=4096"
    common: dict[str, Any] = {"model": model, "aliases": f"synthetic={model}", "max_num_seqs": 4}
    async with (
        running_worker(redis_url, database, worker_id="a", **common),
        running_worker(redis_url, database, worker_id="b", **common),
    ):
        totals = (await setup.run(path)).totals
    assert totals.completed == lines
    computed = (totals.input_tokens - totals.cached_tokens) / totals.input_tokens
    once = num_templates * len(template(0, words)) / totals.input_tokens
    assert computed < 1.6 * once if has_sessions else computed > 1.6 * once


async def test_killed_runs_with_wrong_fingerprints_answer_each_line_once(
    setup: BulkSetup, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(job: JobRequest) -> tuple[bytes, ...]:  # another one in each run
        return tuple(b"%d" % random.randrange(9) for _ in job.job_id)

    monkeypatch.setattr(pending_lines, "fingerprint", lie)
    monkeypatch.setattr(pending_lines, "PART_LINES", 32)
    path = setup.folder / "in.jsonl"
    shuffled(path, templates=7, lines=90)
    async with running_worker(setup.redis_url, database):
        for count in (10, 40):
            with pytest.raises(Interrupted):
                await setup.run(path, window=20, on_progress=interrupt_after(count))
        batch = await setup.run(path)
    assert (batch.state, batch.totals.completed) == (BatchState.COMPLETED, 90)
    assert sorted(names(setup.paths.output), key=int) == [f"{number}" for number in range(90)]
