"""Runs an engine in a process of its own, with an asyncio interface.

The process is a new interpreter at the other end of a Unix socket pair. Frames are a 4-byte length
and MessagePack. The end of the socket tells it that its parent is gone, and it exits. If the engine
process dies, the worker gets `EngineDied` and continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final

import msgspec

from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.release import BASE
from tokenmill_worker.contract.events import Capacity
from tokenmill_worker.contract.host import EngineDied
from tokenmill_worker.contract.messages import (
    CancelRequest,
    Command,
    EngineFailed,
    Frame,
    LoadProgress,
    Logged,
    Ready,
    Report,
    Start,
    Stop,
    Submit,
)
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engines.process.death import DYING_S, end_group, manner_of, members_of
from tokenmill_worker.engines.process.socket_frames import FrameReader

CHILD_MODULE: Final = "tokenmill_worker.engines.process.child"
ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)  # the worker decides when its engine ends
_encoder = msgspec.msgpack.Encoder()


@contextlib.contextmanager
def _ending_signals_blocked() -> Iterator[None]:
    """Block ENDING_SIGNALS in this thread. A process that it creates meanwhile starts with them
    blocked, so that they cannot end it before it ignores them.

    Of several blocks that overlap, the one that began first ends the block. Each process is created
    before its block first waits.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(ENDING_SIGNALS) - before)


class _Reports:
    """The part of a host that is the same wherever its engine runs: ordered reports, last capacity,
    the end, detection of hangs.

    An engine reports at every step, and twice a second while idle. A ready engine that sends no
    such report for `stall_s` seconds hangs: a frame without a step does not count.
    """

    def __init__(self, stall_s: float | None = None) -> None:
        self._stall_s = stall_s
        self._has_stepped = False  # since the last check
        self._reports: deque[Report | None] = deque()
        self._arrival: asyncio.Future[None] | None = None  # completed by the next report
        self._capacity: Capacity | None = None
        self._stopping = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def capacity(self) -> Capacity:
        if self._capacity is None:
            raise RuntimeError("the engine has not started")
        return self._capacity

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        self._send(Submit(tuple(requests)))

    def cancel(self, request_id: str, reason: FinishReason, choice: int | None = None) -> None:
        self._send(CancelRequest(request_id, reason, choice))

    def _take_in(self, report: Report | None) -> None:
        if isinstance(report, Logged):
            logging.getLogger(report.logger).log(report.level, "%s", report.message)
            return
        self._has_stepped |= isinstance(report, Frame) and report.ended_s > 0.0
        self._reports.append(report)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _arrived(self) -> None:
        """Wait until at least one report is there; only one task may wait at a time."""
        while not self._reports:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    async def _wait_ready(self, on_progress: Callable[[str, float], None] | None) -> Ready:
        has_begun = False  # its first report is that it imports the engine
        while True:
            await self._arrived()
            report = self._reports.popleft()
            match report:
                case LoadProgress():
                    has_begun = True
                    if on_progress is not None:
                        on_progress(report.message, report.fraction)
                case Ready():
                    self._capacity = report.capacity
                    if self._stall_s is not None:
                        self._look_again(self._stall_s, 0.0)
                    return report
                case EngineFailed():
                    raise EngineDied(report.message, at_start=True, may_pass=report.may_pass)
                case _:
                    raise await self._ended_early(has_begun)

    async def _ended_early(self, has_begun: bool) -> EngineDied:
        words = await manner_of(self._process)
        words = f"the engine process ended{words} before it was ready"
        return EngineDied(words, at_start=True, may_pass=True)

    def _look_again(self, stall_s: float, silent_s: float) -> None:
        """Schedule the next check for silence.

        Silence is summed per check, so that a worker that was itself frozen adds one check, not the
        whole time.
        """
        pause_s = min(1.0, stall_s / 4)
        asyncio.get_running_loop().call_later(pause_s, self._look, stall_s, silent_s + pause_s)

    def _look(self, stall_s: float, silent_s: float) -> None:
        if self._stopping:
            return
        if self._has_stepped:
            self._has_stepped, silent_s = False, 0.0
        if silent_s >= stall_s:
            self._take_in(
                EngineFailed(f"it hangs: no step for {silent_s:g} s (stall_seconds is {stall_s:g})")
            )
        else:
            self._look_again(stall_s, silent_s)

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield one frame per iteration; frames that arrived meanwhile are merged into one."""
        while True:
            await self._arrived()
            reports = list(self._reports)
            self._reports.clear()
            frames = [report for report in reports if isinstance(report, Frame)]
            if frames:
                self._capacity = frames[-1].capacity
                yield _as_one(frames)
            for report in reports:
                if isinstance(report, EngineFailed):
                    raise EngineDied(report.message, any_step=report.any_step)
                if report is None:
                    if self._stopping:
                        return
                    raise EngineDied(f"the engine process ended{await manner_of(self._process)}")


def _as_one(frames: list[Frame]) -> Frame:
    if len(frames) == 1:
        return frames[0]
    events = tuple(event for frame in frames for event in frame.events)
    stats = next((frame.stats for frame in reversed(frames) if frame.stats is not None), None)
    return msgspec.structs.replace(
        frames[-1],
        events=events,
        stats=stats,
        ended_s=next((frame.ended_s for frame in frames if frame.ended_s), 0.0),
    )


async def _end_group(leader: int) -> None:
    """End the group of a process that has ended, and give what is left a second to end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DYING_S):
            while members_of(leader):
                end_group(leader)
                await asyncio.sleep(0.02)


class EngineProcess(_Reports):
    """An engine in a process of its own, which lives from `start` to `stop` or `kill`.

    `start` is its first frame, `python` the interpreter of its environment, if that is not the
    worker's. It leads a process group, which ends with it.
    """

    def __init__(self, start: Start, stall_s: float | None = None, *, python: str = "") -> None:
        super().__init__(stall_s)
        self._python = python or sys.executable
        self._first_frame = start
        self._frames: FrameReader | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, on_progress: Callable[[str, float], None] | None = None) -> Ready:
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            _, self._frames = await loop.create_unix_connection(
                lambda: FrameReader(self._take_in), sock=ours
            )
            try:
                with _ending_signals_blocked():
                    self._process = await asyncio.create_subprocess_exec(
                        self._python, "-m", CHILD_MODULE, str(theirs.fileno()),
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,  # the worker, not the engine, handles Ctrl-C
                    )  # fmt: skip
            except OSError as error:
                self._frames.close()
                words = f"{self._python} cannot be run: {error.strerror}"
                raise EngineDied(words, at_start=True) from error
        if self._stopping:  # stop() ran while the process was created and could not end it
            await self._end(limit_s=0.0)
            raise EngineDied("the engine was stopped while it started", at_start=True)
        self._write(_encoder.encode(self._first_frame))
        return await self._wait_ready(on_progress)

    async def _ended_early(self, has_begun: bool) -> EngineDied:
        death = await super()._ended_early(has_begun)
        has_failed = self._process is not None and self._process.returncode == 1
        if has_failed and not has_begun and self._python != sys.executable:
            words = (
                f"{self._python} lacks tokenmill, or cannot run it: {self._python} -m pip install"
            )
            words += f" . in the folder of tokenmill {BASE}"
            return EngineDied(words, at_start=True)
        return death

    def _send(self, command: Command) -> None:
        self._write(_encoder.encode(command))

    def _write(self, payload: bytes) -> None:
        if self._frames is not None:
            self._frames.write(payload)

    async def stop(self) -> None:
        """Send Stop and kill the process after five seconds; while it loads, kill it at once."""
        self._stopping = True
        self._send(Stop())
        await self._end(limit_s=5.0 if self._capacity is not None else 0.0)

    async def kill(self) -> None:
        self._stopping = True
        await self._end(limit_s=0.0)

    async def _end(self, limit_s: float) -> None:
        process = self._process
        if process is not None:
            if self._frames is not None and self._frames.ended.is_set():
                limit_s = max(limit_s, DYING_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await _end_group(process.pid)
        if self._frames is not None:
            self._frames.close()
            await self._frames.ended.wait()
