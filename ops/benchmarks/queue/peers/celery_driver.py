"""Drives Celery for `ops/bench queue`.

Call it with `worker URL`, or with `one|many|whole URL JOBS TOKENS`, which prints the seconds taken
as JSON. The solo pool makes the worker one process, as ours is. Celery has no call for many tasks.
"""

import json
import sys
import time

import redis
from celery import Celery, Task
from celery.result import ResultSet


def make_task(url: str) -> Task:
    """Make the task `generate(prompt, tokens)`, which publishes as many tokens as ours does."""
    app = Celery("bench", broker=url, backend=url)
    app.conf.update(
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        result_expires=3600,
    )
    connection = redis.Redis.from_url(url)

    @app.task(name="generate", bind=True, shared=False)  # type: ignore[untyped-decorator]
    def generate(task: Task, prompt: str, tokens: int) -> dict[str, object]:
        text = []
        for index in range(tokens):
            token = chr(97 + (len(prompt) + index) % 26)
            connection.publish(f"chunks:{task.request.id}", f"{index}:{token}")
            text.append(token)
        return {"text": "".join(text), "tokens": tokens}

    made: Task = generate
    return made


def main() -> None:
    what, url, *numbers = sys.argv[1:]
    task = make_task(url)
    if what == "worker":
        options = ["--loglevel", "error", "--without-gossip", "--without-mingle"]
        task.app.worker_main(["worker", "--pool", "solo", *options])
        return
    jobs, tokens = map(int, numbers)
    started = time.perf_counter()
    handles = [task.delay(f"Question {n}: why is the sky blue?", tokens) for n in range(jobs)]
    if what == "whole":
        answers = ResultSet(handles).join_native(timeout=600)
        assert [answer["tokens"] for answer in answers] == [tokens] * jobs
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
