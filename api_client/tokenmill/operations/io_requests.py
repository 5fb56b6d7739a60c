"""Effects: the input and output that an operation of the client requests.

Operations are generators (programs). They yield effects and are sent the answers. `Client` and
`AsyncClient` each execute the effects in their own way, so that everything else is written once.

If an effect fails because of the server, QueueUnavailable is raised inside the program;
InvalidRequest if a script rejects an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias, TypeVar

from tokenmill.transport.scripts import Argument, Script

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunScript:
    """Run a Lua script. Answer: the script's reply."""

    script: Script
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Commands:
    """Send several commands in one round trip, in order. Answer: their raw replies.

    `tolerant`: a command that the server refuses has the exception as its reply, and the other
    commands have theirs.
    """

    commands: tuple[tuple[Argument, ...], ...]
    tolerant: bool = False


@dataclass(frozen=True, slots=True)
class Listen:
    """Open the program's subscription, or open it again. Answer: None, once the server has
    confirmed it.
    """

    channel: str


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message. Answer: the next message's bytes; None after `timeout` seconds; MISSED if
    messages may have been lost.
    """

    timeout: float


@dataclass(frozen=True, slots=True)
class Follow:
    """Receive messages, and hand the values that `told_by` makes of each to the caller as Tell
    does.

    It ends at a message of which `told_by` makes None; every streamed token takes this path.
    `taken` is called when the caller asks for the next value. Answer: the message at which it
    ended, or another answer of Receive.
    """

    timeout: float
    told_by: Callable[[Any], Sequence[Any] | None]
    taken: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look up a job's result in the database. Answer: JobResult, or None; None also without a
    database.
    """

    job_id: str


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand a value to the caller, which may take any time before it continues."""

    value: Any


class Signal(Enum):
    MISSED = auto()


Effect: TypeAlias = RunScript | Commands | Listen | Receive | Follow | LookUp | Sleep | Tell
Program: TypeAlias = Generator[Effect, Any, T]
