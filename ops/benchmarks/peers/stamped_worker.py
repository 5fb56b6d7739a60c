"""A whole worker that notes when tokens passed: their step's end, their frame in the I/O process, their append's call.

Of the jobs that are to be noted, and as little as will do: what is kept of every token makes the worker slower, more
by the memory that is never warm than by the time to write it. Notes become lines of a file when the engine has been
idle for a frame: the last answers are on their way yet when it has just become so. Settings come from the environment,
as for any worker; the file's name is the argument. Lines, all times monotonic seconds of the machine's one clock:

    submit <time> <job>                     the engine is handed the job; of every job
    step <end> <sequences> <tokens>         so many got so many; of every step
    token <step's end> <time> <job> <tokens so far>
    append <time> <job> <tokens so far>     its chunk is made; the script's call begins
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TextIO

from ops.benchmarks.peers.stages import NOTED_SEED
from worker.app import Worker
from worker.consume.job_stream import JobStream
from worker.engine.host import EngineProcess
from worker.engine.mailbox import Frame
from worker.engine.types import GenerationRequest
from worker.jobs import Append, Exceptions
from worker.settings import load_settings
from worker.telemetry import configure_logging


def job_of(request_id: str) -> str:
    return request_id.rpartition("/")[0]


class Notes:
    """Of one worker; `write` forgets what it has written."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._so_far: dict[str, int] = {}  # tokens of the requests that are noted
        self._noted: set[str] = set()  # their jobs
        self._steps: list[tuple[float, int, int]] = []
        self._tokens: list[tuple[float, float, str, int]] = []
        self._appends: list[tuple[float, str, int]] = []

    def submitted(self, requests: Iterable[GenerationRequest], now: float) -> None:
        for request in requests:
            job = job_of(request.request_id)
            self._file.write(f"submit {now} {job}\n")
            if request.params.seed == NOTED_SEED:
                self._so_far[request.request_id] = 0
                self._noted.add(job)

    def frame(self, frame: Frame) -> None:
        now, so_far = time.monotonic(), self._so_far
        num_sequences = num_tokens = 0
        for event in frame.events:
            if event.token_ids:
                num_sequences += 1
                num_tokens += len(event.token_ids)
                if (request := event.request_id) in so_far:
                    so_far[request] += len(event.token_ids)
                    self._tokens.append((frame.ended_s, now, request, so_far[request]))
        if num_tokens:
            self._steps.append((frame.ended_s, num_sequences, num_tokens))

    def append(self, items: list[Append]) -> None:
        now, noted = time.monotonic(), self._noted
        for item in items:
            if (job := item.chunk.job_id) in noted:
                self._appends.append((now, job, item.chunk.end))

    def write(self) -> None:
        self._file.writelines(f"step {end} {sequences} {tokens}\n" for end, sequences, tokens in self._steps)
        self._file.writelines(
            f"token {end} {now} {job_of(request)} {count}\n" for end, now, request, count in self._tokens
        )
        self._file.writelines(f"append {now} {job} {count}\n" for now, job, count in self._appends)
        self._file.flush()
        for lines in (self._steps, self._tokens, self._appends):
            lines.clear()


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

    async def append(self, items: list[Append]) -> Exceptions:
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
