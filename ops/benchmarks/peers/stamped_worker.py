"""A whole worker that notes which tokens selected jobs got from which step.

It notes as little as possible: what is kept for every token makes the worker slower, more through
cold memory than through the time of writing. A noted job has NOTED_SEED as its seed, which greedy
sampling ignores. Settings come from the environment, as for any worker; the arguments are the
file's name, and as JSON the values of EngineConfig that are no settings. The file is complete when
the engine is idle. A line is

    <step's end> <job> <tokens so far>

in seconds of the machine's monotonic clock.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
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
        self._so_far: dict[str, int] = {}  # number of tokens so far, by noted request

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests = tuple(requests)
        self._so_far |= {r.request_id: 0 for r in requests if r.params.seed == NOTED_SEED}
        super().submit(requests)

    async def frames(self) -> AsyncIterator[Frame]:
        async for frame in super().frames():
            yield frame
            for event in frame.events:
                if event.token_ids and (request := event.request_id) in self._so_far:
                    count = self._so_far[request] = self._so_far[request] + len(event.token_ids)
                    self._file.write(f"{frame.ended_s} {request.rpartition('/')[0]} {count}\n")
            if frame.stats is not None and not frame.stats.num_running:
                self._file.flush()


def main() -> int:
    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format)
    config = replace(settings.engine_config(), **json.loads(sys.argv[2]))
    start = start_of(config, settings.cache_dir)
    with Path(sys.argv[1]).open("a", encoding="ascii", buffering=1 << 20) as file:

        def make_host() -> StampingHost:
            return StampingHost(start, settings.engine_python, file)

        return asyncio.run(Worker(settings, make_host, has_process=True).serve())


if __name__ == "__main__":
    sys.exit(main())
