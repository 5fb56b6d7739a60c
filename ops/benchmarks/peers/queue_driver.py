"""Drives Celery or arq for `ops/bench queue`, each as its documentation recommends.

    queue_driver.py celery|arq worker URL
    queue_driver.py celery|arq one|many|whole URL JOBS TOKENS

The second form submits jobs one by one or together (Celery has no call for that), `whole` waits for
all results too; it prints the seconds taken. arq's environment has nothing of ours, so this imports
nothing of ours. Every task publishes as many tokens as our worker does.
"""

import asyncio
import sys
import time
from typing import Any

PROMPT = "Question {}: why is the sky blue?"


def _messages(prompt: str, tokens: int) -> list[str]:
    return [f"{index}:{chr(97 + (len(prompt) + index) % 26)}" for index in range(tokens)]


def _answer(prompt: str, tokens: int) -> dict[str, object]:
    text = "".join(message[-1] for message in _messages(prompt, tokens))
    return {"text": text, "tokens": tokens}


def drive_celery(what: str, url: str, jobs: int, tokens: int) -> float:
    import redis
    from celery import Celery, Task
    from celery.result import ResultSet

    app = Celery("bench", broker=url, backend=url)
    app.conf.update(task_serializer="json", result_serializer="json", accept_content=["json"])
    connection = redis.Redis.from_url(url)

    @app.task(name="generate", bind=True, shared=False)  # type: ignore[untyped-decorator]
    def generate(task: Task, prompt: str, tokens: int) -> dict[str, object]:
        for message in _messages(prompt, tokens):
            connection.publish(f"chunks:{task.request.id}", message)
        return _answer(prompt, tokens)

    if what == "worker":  # the solo pool makes the worker one process, as ours is
        options = ["--loglevel", "error", "--without-gossip", "--without-mingle"]
        app.worker_main(["worker", "--pool", "solo", *options])
    started = time.perf_counter()
    handles = [generate.delay(PROMPT.format(number), tokens) for number in range(jobs)]
    if what == "whole":
        answers = ResultSet(handles).join_native(timeout=600)
        assert [answer["tokens"] for answer in answers] == [tokens] * jobs
    return time.perf_counter() - started


async def generate_in_arq(context: dict[str, Any], prompt: str, tokens: int) -> dict[str, object]:
    for message in _messages(prompt, tokens):
        await context["redis"].publish(f"chunks:{context['job_id']}", message)
    return _answer(prompt, tokens)


def drive_arq(what: str, url: str, jobs: int, tokens: int) -> float:
    import arq  # type: ignore[import-not-found]  # in its own environment only
    from arq.connections import RedisSettings  # type: ignore[import-not-found]

    settings, poll_s = RedisSettings.from_dsn(url), 0.05
    if what == "worker":
        functions = [generate_in_arq]
        arq.worker.Worker(functions, redis_settings=settings, max_jobs=256, poll_delay=poll_s).run()

    async def submit() -> float:
        pool = await arq.create_pool(settings)
        calls = ((generate_in_arq.__name__, PROMPT.format(n), tokens) for n in range(jobs))
        started = time.perf_counter()
        if what == "one":
            handles = [await pool.enqueue_job(*call) for call in calls]
        else:
            handles = await asyncio.gather(*(pool.enqueue_job(*call) for call in calls))
        if what == "whole":
            waits = (handle.result(timeout=600, poll_delay=poll_s) for handle in handles)
            assert all(answer["tokens"] == tokens for answer in await asyncio.gather(*waits))
        seconds = time.perf_counter() - started
        await pool.aclose()
        return seconds

    return asyncio.run(submit())


if __name__ == "__main__":
    system, what, url, *numbers = sys.argv[1:]
    jobs, tokens = map(int, numbers or (0, 0))
    print({"celery": drive_celery, "arq": drive_arq}[system](what, url, jobs, tokens))
