"""A whole worker that notes three times per token: its step's end, its frame's arrival, its append.

It notes only selected jobs, and as little as possible: what is kept for every token makes the
worker slower, more through cold memory than through the time of writing. The times are written to a
file when the engine has been idle for two frames in a row, because at the first idle frame the last
answers are still on their way. Settings come from the environment, as for any worker; the argument
is the file's name. All times are seconds of the machine's monotonic clock. The lines are:

    submit <time> <job>                     the engine receives the job; for every job step <end>
    <sequences> <tokens>         the step gave so many sequences so many tokens; every step token
    <step's end> <time> <job> <tokens so far> append <time> <job> <tokens so far>     the chunk is
    built; the script's call begins
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TextIO

from ops.benchmarks.peers.stages import NOTED_SEED
from tokenmill_worker.app import Worker
from tokenmill_worker.consume.job_stream import JobStream
from tokenmill_worker.engine.process.host import EngineProcess
from tokenmill_worker.engine.process.messages import Frame
from tokenmill_worker.engine.types import GenerationRequest
from tokenmill_worker.jobs import AppendFailures, ChunkAppend
from tokenmill_worker.settings import load_settings
from tokenmill_worker.telemetry import configure_logging


def job_of(request_id: str) -> str:
    return request_id.rpartition("/")[0]


class Notes:
    """Times noted by one worker; `write` clears what it has written."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._so_far: dict[str, int] = {}  # number of tokens so far, by noted request
        self._noted: set[str] = set()  # noted jobs
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

    def append(self, items: list[ChunkAppend]) -> None:
        now, noted = time.monotonic(), self._noted
        for item in items:
            if (job := item.chunk.job_id) in noted:
                self._appends.append((now, job, item.chunk.end))

    def write(self) -> None:
        self._file.writelines(
            f"step {end} {sequences} {tokens}\n" for end, sequences, tokens in self._steps
        )
        self._file.writelines(
            f"token {end} {now} {job_of(request)} {count}\n"
            for end, now, request, count in self._tokens
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

    async def append(self, items: list[ChunkAppend]) -> AppendFailures:
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
