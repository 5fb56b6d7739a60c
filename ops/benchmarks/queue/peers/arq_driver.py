"""Drives arq for `ops/bench queue`; runs in arq's own environment and imports nothing of ours.

Call it with `worker URL`, or with `one|many|whole URL JOBS TOKENS`, which prints the seconds taken
as JSON.
"""

import asyncio
import json
import sys
import time
from typing import Any

import arq  # type: ignore[import-not-found]  # in its own environment only
from arq.connections import RedisSettings  # type: ignore[import-not-found]


async def generate(context: dict[str, Any], prompt: str, tokens: int) -> dict[str, object]:
    text = []
    for index in range(tokens):
        token = chr(97 + (len(prompt) + index) % 26)
        await context["redis"].publish(f"chunks:{context['job_id']}", f"{index}:{token}")
        text.append(token)
    return {"text": "".join(text), "tokens": tokens}


async def drive(what: str, url: str, jobs: int, tokens: int) -> None:
    pool = await arq.create_pool(RedisSettings.from_dsn(url))
    prompts = [f"Question {number}: why is the sky blue?" for number in range(jobs)]
    started = time.perf_counter()
    if what == "one":
        handles = [await pool.enqueue_job("generate", prompt, tokens) for prompt in prompts]
    else:
        handles = await asyncio.gather(
            *(pool.enqueue_job("generate", prompt, tokens) for prompt in prompts)
        )
    if what == "whole":
        results = await asyncio.gather(
            *(handle.result(timeout=600, poll_delay=0.05) for handle in handles)
        )
        assert all(result["tokens"] == tokens for result in results)
    seconds = time.perf_counter() - started
    await pool.aclose()
    print(json.dumps({"seconds": seconds}))


def main() -> None:
    what, url, *numbers = sys.argv[1:]
    if what == "worker":
        settings = RedisSettings.from_dsn(url)
        arq.worker.Worker(
            [generate], redis_settings=settings, max_jobs=256, poll_delay=0.05, keep_result=3600
        ).run()
    else:
        jobs, tokens = map(int, numbers)
        asyncio.run(drive(what, url, jobs, tokens))


if __name__ == "__main__":
    main()
