"""Where other threads leave work for the engine's loop: requests, cancels, the order to stop.

Plain Python. One reader (the loop), any number of writers; messages are handed over in order, all that
are there at once, so that requests which arrive together are admitted together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import msgspec

from schemas.generation import FinishReason
from worker.engine.types import Capacity, EngineStats, GenerationRequest, TokenEvent

MAX_FRAME_BYTES: Final = 1 << 28
FOLLOWS: Final = "following rank 0"  # the Progress of a rank that never becomes ready


class FrameError(ValueError):
    """Bytes on the pipe that are no frame: the process at its other end is not what it should be."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    requests: tuple[GenerationRequest, ...]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str
    reason: FinishReason
    choice: int | None = None


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End now; what runs is dropped without an event."""


class ResetCache(msgspec.Struct, frozen=True, tag="reset_cache"):
    """Forget the prefix cache (weights changed, or a test)."""


Command = Submit | Cancel | Stop | ResetCache


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine's first word: it has loaded."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_path: str
    description: str  # one line for people: device, dtype, attention backend, blocks
    capacity: Capacity


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag="frame"):
    """One step's events, and the state after it. Short steps go without figures, which would be a tenth of the frame;
    what is told next counts them all."""

    events: tuple[TokenEvent, ...]
    capacity: Capacity
    stats: EngineStats | None = None
    ended_s: float = 0.0  # when the step ended, on the machine's monotonic clock


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The engine's last report: it could not load, or it cannot go on.

    `any_step`: its steps fail whatever they hold, so no request is to blame.
    """

    message: str
    at_start: bool = False
    any_step: bool = False


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Said while loading: what is going on, and how far (0–1)."""

    message: str
    fraction: float


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """A log record of the engine's process, for the worker's log: this process has none of its own."""

    level: int
    logger: str
    message: str


Report = Ready | Frame | Broken | Progress | Logged

_command_decoder: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
_report_decoder: Final[msgspec.msgpack.Decoder[Report]] = msgspec.msgpack.Decoder(Report)


def read_command(data: bytes) -> Command:
    """Raises FrameError."""
    try:
        return _command_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a command cannot be decoded: {error}") from error


def read_report(data: bytes) -> Report:
    """Raises FrameError."""
    try:
        return _report_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a report cannot be decoded: {error}") from error


class Mailbox:
    """A queue that is emptied in one go. `wake` is called after each put, for a reader that sleeps elsewhere."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._messages: list[Command] = []
        self._arrived = threading.Condition()
        self._wake = wake

    def put(self, message: Command) -> None:
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()
        if self._wake is not None:
            self._wake()

    def take_all(self, timeout: float = 0.0) -> list[Command]:
        """Everything that is there; if nothing is, wait up to `timeout` seconds for something."""
        if not self._messages and not timeout:  # a plain read is atomic: no lock on the busy path
            return []
        with self._arrived:
            if not self._messages and timeout:
                self._arrived.wait(timeout)
            messages, self._messages = self._messages, []
            return messages
