"""Measures what a chat notices: `REDIS_URL QUEUE` submits one short interactive job after another
and prints the milliseconds to its first token, one number a line, until its input is closed.

It is a process of its own, so that the fuzz beside it does not hold its interpreter.
"""

# ruff: noqa: T201 - a command: it prints
from __future__ import annotations

import sys
import threading
import time
from typing import Final

from tokenmill import Client

PAUSE_S: Final = 0.05
PROMPT: Final = "Why is the sky blue?"


def main(url: str, queue: str) -> None:
    ended = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(ended,), daemon=True).start()
    with Client(url, queue=queue) as client:
        while not ended.is_set():
            started = time.perf_counter()
            job = client.submit(
                prompt=PROMPT, max_tokens=4, ignore_eos=True, priority="interactive", tenant="probe"
            )
            first_ms = None
            for _ in client.stream(job):
                first_ms = first_ms or (time.perf_counter() - started) * 1e3
            print(f"{first_ms:.2f}", flush=True)
            ended.wait(PAUSE_S)


def _wait_for_the_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main(*sys.argv[1:])
