"""Structured output survives `kill -9`: workers die at every token of jobs with JSON schemas,
expressions and grammars.

A worker continues a job from its log: it advances the grammar over the logged tokens and goes on at
the next one. Each worker of a run lives for a few steps. Every job must end as it ends undisturbed:
the same bytes, valid, each token published once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.chaos import doomed_worker, structured_worker
from tests.chaos.checker import Received, Wanted, violations
from tests.chaos.test_kill_points import listen
from tests.engines.own.lora.support import save_adapter
from tests.engines.own.truth import tiny_models
from tests.support.marks import LONG
from tests.support.worker import PatientStream, client_of, database_url, running_worker
from tokenmill_schemas.result import JobResult
from tokenmill_worker.engines.synthetic.runner import TOKENIZER

pytestmark = [pytest.mark.redis, pytest.mark.chaos, pytest.mark.timeout(1800)]

END = 256  # the model-free engine's tokenizer: 256 bytes, then the token that ends an answer
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any]] = {
    "json": {"json_schema": PERSON},
    "regex": {"regex": r"[a-f]{4,8}-[0-9]{3}(, (yes|no)){2}"},
    "ebnf": {"grammar": 'root ::= "(" item ("," item){2,4} ")"\nitem ::= [a-c] [0-9] | "nil"'},
}
EBNF_AS_REGEX = r"\((?:[a-c][0-9]|nil)(?:,(?:[a-c][0-9]|nil)){2,4}\)"
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.5, "seed": 8, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 9, "lora": "poet"},
)
# Each prompt begins differently: of jobs with a common block of tokens one computes it, and the
# others wait, so a step would not give each job a token.
JOBS: list[dict[str, Any]] = [
    {"prompt": f"{i} fill in {name}", "response_format": form, "max_tokens": 120, **sampling}
    for i, ((name, form), sampling) in enumerate(itertools.product(FORMATS.items(), SAMPLING))
] + [
    {
        "prompt": f"Fill in {i}",
        "response_format": FORMATS["json"],
        "max_tokens": 120,
        "temperature": 1.0,
        "seed": i,
    }
    for i in range(8)
]


def assert_valid(job: dict[str, Any], text: str) -> None:
    form = job["response_format"]
    if "json_schema" in form:
        jsonschema.validate(json.loads(text), PERSON)
    else:
        assert re.fullmatch(form.get("regex", EBNF_AS_REGEX), text), text


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    base = tiny_models.save("llama", folder / "base")
    for file in TOKENIZER.glob("tokenizer*.json"):
        (base / file.name).write_bytes(file.read_bytes())
    # the end of an answer is that tokenizer's
    for name in ("config.json", "generation_config.json"):
        values = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(values | {"eos_token_id": END}))
    adapter = save_adapter(base, folder / "poet", 1)
    return {
        "model": str(base), "adapters": f"poet={adapter}", "dtype": "float32", "num_threads": 1,
        # A job that was in the engine at a death and did not progress is a suspect: each such death
        # halves the batch that it may run in. So large a batch still holds all jobs after five.
        "max_num_seqs": 1024, "max_num_batched_tokens": 2048,
        "max_crashes": 10_000,
    }  # fmt: skip


@pytest.mark.parametrize("speculative_tokens", [0, 3])
async def test_jobs_with_a_grammar_continue_after_a_kill_at_any_token(
    redis_url: str, tmp_path: Path, settings: dict[str, Any], rounds: int, speculative_tokens: int
) -> None:
    """A worker dies after every step in the long form, else after every twentieth."""
    settings = settings | {"speculative_tokens": speculative_tokens}
    steps = 1 if rounds >= LONG else 20
    calm = await undisturbed(redis_url, tmp_path, settings, JOBS)
    for asked, result in zip(JOBS, calm, strict=True):
        assert result.finish_reason == "stop", (asked, result.error)
        assert_valid(asked, result.text)
    database = database_url(tmp_path)
    died_at: dict[str, set[int]] = {}
    async with client_of(redis_url, database) as client:
        jobs = [await client.submit(**asked) for asked in JOBS]
        received: dict[str, list[Received]] = {job: [Received(), Received()] for job in jobs}
        early = [asyncio.create_task(listen(client, job, received[job][0])) for job in jobs]
        wanted: dict[str, Wanted] = {
            job: Wanted.of(result) for job, result in zip(jobs, calm, strict=True)
        }
        lengths = {job: len(wanted[job].answer[0][0]) for job in jobs}

        def num_open() -> int:
            return sum(
                not received[job][0].ended and received[job][0].num_tokens < lengths[job]
                for job in jobs
            )

        for number in itertools.count():
            if not num_open():
                break
            await run_doomed(steps, redis_url, database, settings, num_open)
            await settle(received)
            for job in jobs:
                died_at.setdefault(job, set()).add(received[job][0].num_tokens)
            assert number < 400, "the jobs make no progress"
        async with running_worker(
            redis_url, database, worker_id="survivor", stream_type=PatientStream, **settings
        ):
            await asyncio.wait_for(asyncio.gather(*early), 90)
            for job in jobs:
                await listen(client, job, received[job][1])
    assert violations(database, wanted, received) == []
    if steps == 1 and not speculative_tokens:
        missed = {job: set(range(1, lengths[job])) - died_at[job] for job in jobs}
        assert not any(missed.values()), f"no worker died after these tokens: {missed}"


async def undisturbed(
    redis_url: str, folder: Path, settings: dict[str, Any], jobs: Sequence[dict[str, Any]]
) -> list[JobResult]:
    """Return the results of jobs that one worker runs to their end, with a database of its own."""
    database = database_url(folder, "calm")
    async with (
        running_worker(redis_url, database, **settings),
        client_of(redis_url, database) as client,
    ):
        ids = [await client.submit(**job) for job in jobs]
        return [await client.result(job, timeout=90) for job in ids]


async def run_doomed(
    count: int,
    redis_url: str,
    database: str,
    settings: dict[str, Any],
    num_open: Callable[[], int],
) -> None:
    """Run a worker until it has killed itself, or kill it when the jobs leave it nothing to
    generate.
    """
    arguments = ("after append", count, num_open(), redis_url, database, settings)
    process = doomed_worker.start(structured_worker.main, *arguments)
    try:
        async with asyncio.timeout(120):
            while process.is_alive() and num_open():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        process.join()
    status = process.exitcode
    assert status == -signal.SIGKILL, f"the worker ended with {status}"


async def settle(received: dict[str, list[Received]]) -> None:
    """Wait until the subscribers get no more chunks of the dead worker."""
    collected = -1
    while collected != (  # noqa: ASYNC110
        collected := sum(subscribers[0].num_tokens for subscribers in received.values())
    ):
        await asyncio.sleep(0.1)
