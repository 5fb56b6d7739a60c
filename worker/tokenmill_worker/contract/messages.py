"""The messages between worker and engine: commands and reports, their decoding, and the mailbox in
which commands wait for the engine's loop.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

import msgspec

from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_schemas.release import BASE
from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.contract.events import Capacity, EngineStats, TokenEvent
from tokenmill_worker.contract.requests import GenerationRequest

MAX_FRAME_BYTES: Final = 1 << 28


class FrameError(ValueError):
    """Bytes on the pipe that are no valid frame."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame to an engine process: which engine it is, and that engine's settings.

    `version` is tokenmill's: an engine may have an environment of its own, with another one.
    """

    engine: str  # its kind
    settings: dict[str, Any]  # those of its kind
    cache_dir: str | None = None  # keeps converted models and compiled kernels
    version: str = BASE  # of tokenmill


class _Version(msgspec.Struct, frozen=True):
    version: str


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    requests: tuple[GenerationRequest, ...]


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str
    reason: FinishReason  # of its end
    choice: int | None = None  # None: all of them


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End now; running requests are dropped without an event."""


Command = Submit | CancelRequest | Stop


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """First report after loading: the engine is ready."""

    model: str  # as the settings name it
    max_model_len: int  # longest prompt and answer together, in tokens
    max_num_seqs: int  # choices that run at once
    vocab_size: int  # ids are below it
    eos_token_ids: tuple[int, ...]  # end an answer
    model_path: str  # folder of the tokenizer
    description: str  # one line for the log: device, dtype, attention backend, blocks
    capacity: Capacity  # now
    sampling_defaults: SamplingParams = SamplingParams()  # of requests that name none
    capabilities: Capabilities = Capabilities()  # what requests may ask for


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag="frame"):
    """One step's events, and the state after it.

    Most frames of short steps omit `stats`, which would be a tenth of the frame. Stats are
    cumulative, so the next ones cover those steps. A frame without `ended_s` is no sign of life: no
    step has ended, but a request did so alone, as a cancelled one does beside others that run.
    """

    events: tuple[TokenEvent, ...]  # in order; one per choice at most
    capacity: Capacity  # after the step
    stats: EngineStats | None = None  # since the start
    ended_s: float = 0.0  # when the step ended, on the machine's monotonic clock; 0: no step has


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine's last report: it could not load, or it cannot continue.

    `any_step`: its steps fail whatever they hold, so no request is the cause. `may_pass`: it lacked
    memory, which another start may have.
    """

    message: str  # one sentence
    at_start: bool = False  # it never became ready
    any_step: bool = False  # no request is the cause
    may_pass: bool = False  # another start may succeed


class LoadProgress(msgspec.Struct, frozen=True, tag="load_progress"):
    """Progress of loading: the current stage, and its fraction (0–1)."""

    message: str  # the stage
    fraction: float  # 0 to 1


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """A log record of the engine process, to be written to the worker's log."""

    level: int  # as in Python's logging
    logger: str
    message: str


Report = Ready | Frame | EngineFailed | LoadProgress | Logged

_version_decoder: Final[msgspec.msgpack.Decoder[_Version]] = msgspec.msgpack.Decoder(_Version)
_start_decoder: Final[msgspec.msgpack.Decoder[Start]] = msgspec.msgpack.Decoder(Start)
_command_decoder: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
_report_decoder: Final[msgspec.msgpack.Decoder[Report]] = msgspec.msgpack.Decoder(Report)


def read_start(data: bytes) -> Start:
    """Decode the first frame. Raises FrameError, also for one of another version."""
    try:
        version = _version_decoder.decode(data).version
        if version == BASE:
            return _start_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"the settings cannot be decoded: {error}") from error
    raise FrameError(
        f"the engine's environment has tokenmill {BASE}, the worker is tokenmill {version}: "
        f"{sys.executable} -m pip install . in the folder of tokenmill {version}"
    )


def read_command(data: bytes) -> Command:
    """Decode a command. Raises FrameError."""
    try:
        return _command_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a command cannot be decoded: {error}") from error


def read_report(data: bytes) -> Report:
    """Decode a report. Raises FrameError."""
    try:
        return _report_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a report cannot be decoded: {error}") from error


class Mailbox:
    """A thread-safe queue whose reader takes all messages at once."""

    def __init__(self) -> None:
        self._messages: list[Command] = []
        self._arrived = threading.Condition()

    def put(self, message: Command) -> None:
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()

    def take_all(self, timeout: float = 0.0) -> list[Command]:
        """Return all messages; if there are none, wait up to `timeout` seconds for one."""
        # reading the list is atomic: no lock while steps run
        if not self._messages and not timeout:
            return []
        with self._arrived:
            if not self._messages and timeout:
                self._arrived.wait(timeout)
            messages, self._messages = self._messages, []
            return messages
