"""A whole worker that notes which tokens selected jobs got from which step.

It notes as little as possible: what is kept for every token makes the worker slower, more through
cold memory than through the time of writing. A noted job has NOTED_SEED as its seed, which greedy
sampling ignores. Settings come from the environment, as for any worker; the arguments are the
file's name, and as JSON the values of EngineConfig that are no settings. A line, written before
the tokens are published, is

    <step's end> <job> <tokens so far>

in seconds of the machine's monotonic clock.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from tokenmill_worker.app import Worker
from tokenmill_worker.builders import start_of
from tokenmill_worker.contract.messages import Frame, Start
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engines.process.host import EngineProcess
from tokenmill_worker.settings import load_settings
from tokenmill_worker.telemetry import configure_logging

NOTED_SEED = 4711


class StampingHost(EngineProcess):
    """Notes into a file the tokens of selected jobs."""

    def __init__(self, start: Start, python: str, file: TextIO) -> None:
        super().__init__(start, python=python)
        self._file = file
        self._noted: set[str] = set()
        self._so_far: Counter[str] = Counter()  # number of tokens so far, by noted request

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests = tuple(requests)
        self._noted |= {r.request_id for r in requests if r.params.seed == NOTED_SEED}
        super().submit(requests)

    async def frames(self) -> AsyncIterator[Frame]:
        async for frame in super().frames():
            for event in frame.events:
                if event.token_ids and (name := event.request_id) in self._noted:
                    self._so_far[name] += len(event.token_ids)
                    job = name.rpartition("/")[0]
                    self._file.write(f"{frame.ended_s} {job} {self._so_far[name]}\n")
            yield frame


def main() -> int:
    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format)
    config = replace(settings.engine_config(), **json.loads(sys.argv[2]))
    start = start_of(config, settings.cache_dir)
    with Path(sys.argv[1]).open("a", encoding="ascii", buffering=1) as file:  # a line at a time
        make_host = partial(StampingHost, start, settings.engine_python, file)
        return asyncio.run(Worker(settings, make_host, has_process=True).serve())


if __name__ == "__main__":
    sys.exit(main())
