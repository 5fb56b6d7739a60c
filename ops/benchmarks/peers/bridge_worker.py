"""A worker as teams write it before `vllm serve`: takes a job, posts it, publishes the tokens.

With `python -m` it is a plain loop over a list in Redis, one thread for each place; a job stays in
a second list until it has ended, and a start puts back what is there. As an application of Celery
it is a task that is acknowledged at its end. Both post a job again from its beginning when the
server has died. They use the fastest HTTP client of the standard library.

Variables: BRIDGE_SOCKET, that of Valkey; BRIDGE_PORT, that of the server; BRIDGE_PLACES.
"""

import http.client
import json
import os
import threading
import time
from typing import Any

import redis
from celery import Celery

SOCKET, PORT = os.environ.get("BRIDGE_SOCKET", ""), int(os.environ.get("BRIDGE_PORT", "0"))
PLACES = int(os.environ.get("BRIDGE_PLACES", "1"))
TOKENS = "tokens"  # channel of [job, number of tokens before, tokens]; the last ones are empty
WAITING, RUNNING = "waiting", "running"  # lists of the plain loop
# A Celery job whose worker has died waits for so long. It must be longer than any task takes.
VISIBLE_AGAIN_S = 120

app = Celery("bridge", broker=f"redis+socket://{SOCKET}", backend=f"redis+socket://{SOCKET}")
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    broker_transport_options={"visibility_timeout": VISIBLE_AGAIN_S},
)
connection = redis.Redis(unix_socket_path=SOCKET, socket_timeout=None)


def answer(job: str, prompt: list[int], max_tokens: int, salt: str) -> list[int]:
    """Return an answer's tokens, after they were published one by one."""
    body = {
        "model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0,
        "ignore_eos": True, "stream": True, "return_token_ids": True, "cache_salt": salt,
    }  # fmt: skip
    while True:
        try:
            return _posted(job, json.dumps(body))
        except (OSError, http.client.HTTPException):
            time.sleep(0.5)  # the server is gone, or has still to load


generate = app.task(name="generate")(answer)


def _posted(job: str, body: str) -> list[int]:
    server = http.client.HTTPConnection("127.0.0.1", PORT)
    server.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    reply = server.getresponse()
    found: list[int] = []
    for line in reply:
        if line.startswith(b"data: {"):
            ids = json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]
            connection.publish(TOKENS, json.dumps([job, len(found), ids]))
            found += ids
        elif line.startswith(b"data: [DONE]"):
            connection.publish(TOKENS, json.dumps([job, len(found), []]))
            return found
    raise ConnectionError(f"the answer has no end, status {reply.status}")


def _serve_waiting() -> None:
    while True:
        job: Any = connection.blmove(WAITING, RUNNING, 0)
        ids = answer(*json.loads(job))
        connection.set(f"answer {json.loads(job)[0]}", json.dumps(ids))
        connection.lrem(RUNNING, 1, job)


if __name__ == "__main__":
    while connection.lmove(RUNNING, WAITING):
        pass
    for _ in range(PLACES):
        threading.Thread(target=_serve_waiting).start()
