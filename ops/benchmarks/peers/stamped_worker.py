"""A whole worker that notes when each token passed: its step's end, its frame in the I/O process, its append's call.

Notes are kept as they come (a reference to what passed, and the time) and written as lines to a file when the engine
has been idle for a frame, so that they cost the measured path next to nothing: the last answers are on their way yet
when it has just become so. Settings come from the environment, as for any worker;
the file's name is the argument. Lines, all times monotonic seconds of the machine's one clock:

    submit <time> <job>                     the engine is handed the job
    token <step's end> <time> <job> <tokens so far>
    append <time> <job> <tokens so far>     its chunk is made; the script's call begins
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from worker.app import Worker
from worker.consume.job_stream import JobStream
from worker.engine.host import EngineProcess
from worker.engine.mailbox import Frame
from worker.engine.types import GenerationRequest
from worker.jobs import Append, AppendReply
from worker.settings import load_settings
from worker.telemetry import configure_logging


class Notes:
    """Of one worker; `write` forgets what it has written."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._frames: list[tuple[float, Frame]] = []
        self._appends: list[tuple[float, list[Append]]] = []
        self._so_far: dict[str, int] = {}

    def submitted(self, requests: Iterable[GenerationRequest], now: float) -> None:
        self._file.writelines(f"submit {now} {request.request_id}\n" for request in requests)

    def frame(self, frame: Frame) -> None:
        self._frames.append((time.monotonic(), frame))

    def append(self, items: list[Append]) -> None:
        self._appends.append((time.monotonic(), items))

    def write(self) -> None:
        self._file.writelines(self._token_lines())
        for now, items in self._appends:
            self._file.writelines(f"append {now} {item.chunk.job_id} {item.chunk.end}\n" for item in items)
        self._file.flush()
        self._frames.clear()
        self._appends.clear()

    def _token_lines(self) -> Iterator[str]:
        for now, frame in self._frames:
            for event in frame.events:
                if event.token_ids:
                    count = self._so_far.get(event.request_id, 0) + len(event.token_ids)
                    self._so_far[event.request_id] = count
                    yield f"token {frame.ended_s} {now} {event.request_id} {count}\n"


class StampingHost(EngineProcess):
    notes: Notes

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests, now = tuple(requests), time.monotonic()
        super().submit(requests)
        self.notes.submitted(requests, now)

    async def frames(self) -> AsyncIterator[Frame]:
        was_idle = False
        async for frame in super().frames():
            self.notes.frame(frame)
            yield frame
            is_idle = frame.stats is not None and not frame.stats.num_running
            if is_idle and was_idle:
                self.notes.write()
            was_idle = is_idle


class StampingStream(JobStream):
    notes: Notes

    async def append(self, items: list[Append]) -> list[tuple[AppendReply, int]]:
        self.notes.append(items)
        return await super().append(items)


def main() -> int:
    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format)
    with Path(sys.argv[1]).open("a", encoding="ascii", buffering=1 << 20) as file:
        notes = Notes(file)

        def make_host() -> StampingHost:
            host = StampingHost(settings.engine_config(), cache_dir=settings.cache_dir)
            host.notes = notes
            return host

        worker = Worker(settings, make_host, stream_type=StampingStream, has_process=True)
        assert isinstance(worker.stream, StampingStream), "what it was told to make"
        worker.stream.notes = notes
        return asyncio.run(worker.serve())


if __name__ == "__main__":
    sys.exit(main())
