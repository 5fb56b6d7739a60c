"""A whole worker that notes which tokens selected jobs got from which step.

It notes as little as possible: what is kept for every token makes the worker slower, more through
cold memory than through the time of writing. A noted job has NOTED_SEED as its seed, which greedy
sampling ignores. The lines are written to a file when the engine has been idle for two frames in a
row, because at the first idle frame the last answers are still on their way. Settings come from the
environment, as for any worker; the arguments are the file's name, and as JSON the values of
EngineConfig that are no settings. A line is

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

    def __init__(self, start: Start, file: TextIO) -> None:
        super().__init__(start)
        self._file = file
        self._so_far: dict[str, int] = {}  # number of tokens so far, by noted request
        self._tokens: list[tuple[float, str, int]] = []

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests = tuple(requests)
        self._so_far |= {r.request_id: 0 for r in requests if r.params.seed == NOTED_SEED}
        super().submit(requests)

    async def frames(self) -> AsyncIterator[Frame]:
        was_idle = False
        async for frame in super().frames():
            for event in frame.events:
                if event.token_ids and (request := event.request_id) in self._so_far:
                    self._so_far[request] += len(event.token_ids)
                    self._tokens.append((frame.ended_s, request, self._so_far[request]))
            yield frame
            is_idle = frame.stats is not None and not frame.stats.num_running
            if is_idle and was_idle:
                self._write_notes()
            was_idle = is_idle

    def _write_notes(self) -> None:
        self._file.writelines(
            f"{end} {request.rpartition('/')[0]} {count}\n" for end, request, count in self._tokens
        )
        self._file.flush()
        self._tokens.clear()


def main() -> int:
    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format)
    with Path(sys.argv[1]).open("a", encoding="ascii", buffering=1 << 20) as file:

        def make_host() -> StampingHost:
            config = replace(settings.engine_config(), **json.loads(sys.argv[2]))
            return StampingHost(start_of(config, settings.cache_dir), file)

        worker = Worker(settings, make_host, has_process=True)
        return asyncio.run(worker.serve())


if __name__ == "__main__":
    sys.exit(main())
