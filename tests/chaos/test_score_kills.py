"""Log-probabilities survive `kill -9`: prompts and given answers have the values that they have
undisturbed, each once, though each worker lives for a few steps.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.test_structured_kills import END, run_doomed, undisturbed
from tests.engines.own.truth import tiny_models
from tests.support.worker import PatientStream, client_of, database_url, running_worker
from tokenmill import AsyncClient
from tokenmill_schemas.generation import TokenLogprob
from tokenmill_schemas.result import JobResult
from tokenmill_worker.engines.synthetic.runner import TOKENIZER

pytestmark = [pytest.mark.redis, pytest.mark.chaos, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
STORY = "Once upon a time there was a mill by the river, and it ground words into tokens. "
JOBS: list[dict[str, Any]] = [
    {"prompt": f"{i}. {STORY}", "max_tokens": 12, "temperature": 0, "prompt_logprobs": 2,
     "logprobs": True, "n": n, "ignore_eos": True}
    for i, n in enumerate((1, 1, 3))
] + [
    {"prompt": f"{i}. {STORY}", "top_logprobs": 2,
     "continuations": [STORY[:length] for length in (1, 9, 60, 25)]}
    for i in range(3, 6)
]  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tiny_models.save("llama", tmp_path_factory.mktemp("model") / "base")
    for file in TOKENIZER.glob("tokenizer*.json"):
        (base / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        values = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(values | {"eos_token_id": END}))
    return {
        "model": str(base), "dtype": "float32", "num_threads": 1,
        "max_num_seqs": 1024, "max_num_batched_tokens": 1024,
        "max_crashes": 10_000,
    }  # fmt: skip


def scores_of(result: JobResult) -> list[tuple[TokenLogprob, ...]]:
    prompt = () if result.prompt is None else result.prompt.logprobs
    return [prompt, *(choice.logprobs or () for choice in result.choices)]


async def test_log_probabilities_are_the_same_after_kills(
    redis_url: str, tmp_path: Path, settings: dict[str, Any], rounds: int
) -> None:
    """A worker dies after every step if `--rounds` is at least 50, else after every third."""
    calm = await undisturbed(redis_url, tmp_path, settings, JOBS)
    database = database_url(tmp_path)
    async with client_of(redis_url, database) as client:
        jobs = [await client.submit(**asked) for asked in JOBS]
        streams = [asyncio.create_task(streamed(client, job)) for job in jobs]

        def num_open() -> int:
            return sum(not stream.done() for stream in streams)

        for _ in range(12 if rounds >= 50 else 4):
            await run_doomed(1 if rounds >= 50 else 3, redis_url, database, settings, num_open)
        async with running_worker(
            redis_url, database, worker_id="survivor", stream_type=PatientStream, **settings
        ):
            received = await asyncio.wait_for(asyncio.gather(*streams), 120)
            ended = [await client.result(job, timeout=90, check=True) for job in jobs]
            deliveries = [(await client.status(job)).deliveries for job in jobs]
    assert max(deliveries) > 1
    for asked, before, result, stream in zip(JOBS, calm, ended, received, strict=True):
        assert before.error is None
        assert [c.token_ids for c in result.choices] == [c.token_ids for c in before.choices]
        assert (result.prompt is not None) == ("prompt_logprobs" in asked)
        for found, wanted in zip(scores_of(result), scores_of(before), strict=True):
            assert [one.logprob for one in found] == pytest.approx(
                [one.logprob for one in wanted], abs=TOLERANCE
            )
            assert [one.token_bytes for one in found] == [one.token_bytes for one in wanted]
        assert stream == scores_of(result)


async def streamed(client: AsyncClient, job: str) -> list[tuple[TokenLogprob, ...]]:
    """Return the log-probabilities of the prompt and of each choice, as a stream has them."""
    prompt: tuple[TokenLogprob, ...] = ()
    choices: dict[int, tuple[TokenLogprob, ...]] = {}
    async for chunk in client.stream(job):
        if chunk.prompt is not None:
            prompt += chunk.prompt.logprobs
        choices[chunk.choice] = (*choices.get(chunk.choice, ()), *(chunk.logprobs or ()))
    return [prompt, *(choices[index] for index in sorted(choices))]
