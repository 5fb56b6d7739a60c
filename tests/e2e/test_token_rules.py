"""Biased, banned and forced tokens of a job hold from its submission to its result, also where its
engine dies in the middle of the answer.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_llama
from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.result import JobResult, JobStatus

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]

NUM_TOKENS = 900
PROMPT = list(b"ab ab ab")
RULES: dict[str, Any] = {
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[97, 98], [101]],
    "sequence_bias": [[[120], 4.0], [[120, 121], -6.0]],
    "suppress_tokens": list(range(200, 272)),
    "begin_suppress_tokens": [120],
    "forced_bos_token_id": 65,
    "forced_eos_token_id": 66,
}
ASKED: dict[str, Any] = {
    "prompt_ids": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 5, "n": 2, **RULES,
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    folder = tiny_llama.save(tmp_path / "tiny")
    return {"model": str(folder), "dtype": "float32", "num_threads": 1}


def check_answers(result: JobResult) -> None:
    """Check each rule against prompt and answer."""
    assert result.status is JobStatus.SUCCEEDED, result.error
    for choice in result.choices:
        answer = list(choice.token_ids)
        tokens = [*PROMPT, *answer]
        pairs = list(itertools.pairwise(tokens))
        written = pairs[len(PROMPT) - 1 :]
        assert len(answer) == NUM_TOKENS
        assert (answer[0], answer[-1]) == (65, 66)
        assert answer[1] != 120
        assert not {101, *range(200, 272)} & set(answer)
        assert (97, 98) not in written
        assert len(set(written[1:-1])) == len(written[1:-1])  # forced tokens may repeat a pair
        assert not set(written[1:-1]) & set(pairs[: len(PROMPT) - 1])


async def test_a_job_killed_in_mid_answer_keeps_its_rules(
    redis_url: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    async with (
        running_worker(redis_url, database_url(tmp_path), in_process=True, **settings) as worker,
        client_of(redis_url, database_url(tmp_path)) as client,
    ):
        job = await client.submit(**ASKED)
        seen = 0
        async for chunk in client.stream(job):
            if not seen and chunk.index > 10:
                seen = chunk.index
                host: Any = worker.service.supervisor.host
                os.kill(host.pid, signal.SIGKILL)
        killed = await client.result(job, timeout=120)
        assert worker.service.health.engine_restarts == 1
        undisturbed = await client.result(await client.submit(**ASKED), timeout=120)
    assert 10 < seen < NUM_TOKENS
    check_answers(killed)
    assert [c.token_ids for c in killed.choices] == [c.token_ids for c in undisturbed.choices]
    assert killed.params is not None
    assert killed.params.no_repeat_ngram_size == 2


async def test_jobs_with_rules_share_a_step_and_a_prefix_with_others(
    redis_url: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A regular expression beside an n-gram ban; the same prompt with and without rules."""
    prompt = [*range(97, 120)] * 20
    plain: dict[str, Any] = {"prompt_ids": prompt, "max_tokens": 40, "temperature": 0}
    jobs = (
        plain,
        {**plain, "no_repeat_ngram_size": 1, "ignore_eos": True},
        {**plain, "response_format": {"regex": "(ab, ){10}"}, "no_repeat_ngram_size": 2},
        {**plain, "response_format": {"regex": "[a-d]{9}"}, "suppress_tokens": [97, 98]},
        {**plain, "response_format": {"regex": "a{9}"}, "bad_words_ids": [[97, 97]]},
    )
    async with (
        running_worker(redis_url, database_url(tmp_path), speculative_tokens=4, **settings),
        client_of(redis_url, database_url(tmp_path)) as client,
    ):
        first, banned, repeating, bound, impossible = [
            await client.result(job, timeout=120)
            for job in [await client.submit(**asked) for asked in jobs]
        ]
        again = await client.result(await client.submit(**plain), timeout=120)
    assert first.token_ids == again.token_ids
    assert again.usage.cached_tokens > 400
    assert len({*prompt, *banned.token_ids}) == len(set(prompt)) + len(banned.token_ids)
    assert repeating.text == "ab, " * 10  # the format leaves nothing else
    assert len(bound.text) == 9
    assert set(bound.text) <= set("cd")
    assert impossible.status is JobStatus.FAILED
    assert impossible.error is not None
    assert impossible.error.code == "invalid_request"
    assert "no token is allowed here" in impossible.error.message


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"bad_words_ids": [[5, 272]]}, "bad_words_ids holds 272, outside the vocabulary of 272"),
        ({"forced_eos_token_id": 999}, "forced_eos_token_id holds 999, outside the vocabulary"),
    ],
)
async def test_ids_beyond_the_vocabulary_fail_the_job_with_one_sentence(
    redis_url: str, tmp_path: Path, settings: dict[str, Any], wrong: dict[str, Any], says: str
) -> None:
    async with (
        running_worker(redis_url, database_url(tmp_path), **settings),
        client_of(redis_url, database_url(tmp_path)) as client,
    ):
        result = await client.result(await client.submit(prompt="x", **wrong), timeout=60)
    assert result.error is not None
    assert result.error.code == "invalid_request"
    assert says in result.error.message
