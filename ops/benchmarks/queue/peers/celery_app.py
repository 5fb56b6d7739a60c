"""Celery application with one task that publishes as many tokens as the model-free engine would."""

import os

import redis
from celery import Celery, Task


def make_app(url: str) -> Celery:
    app = Celery("bench", broker=url, backend=url)
    app.conf.update(
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        result_expires=3600,
    )
    return app


def make_task(url: str) -> Task:
    """Make the task `generate(prompt, tokens)` on an application for `url`.

    The worker and the producers each make it under the same name, for their own application.
    """
    app = make_app(url)
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


app = make_task(os.environ.get("BENCH_BROKER", "redis://127.0.0.1:1/0")).app
