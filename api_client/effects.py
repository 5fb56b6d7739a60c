"""What a client program asks of the world. The programs are generators that yield these and are sent the answers;
`Client` and `AsyncClient` each perform them in their own way, so that everything else is written once.

An effect that fails because of the server is thrown back into the program as QueueUnavailable, and one whose script
refuses an argument as InvalidRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias, TypeVar

from api_client.scripts import Argument, Script

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunScript:
    """Answer: the script's reply."""

    script: Script
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Commands:
    """Several commands in one round trip, in order. Answer: their raw replies. `tolerant`: where the server refuses a
    command, its reply is the exception, and the others are answered all the same.
    """

    commands: tuple[tuple[Argument, ...], ...]
    tolerant: bool = False


@dataclass(frozen=True, slots=True)
class Listen:
    """Open a subscription, or open it anew. Answer: none, once the server has confirmed it."""

    channel: str


@dataclass(frozen=True, slots=True)
class Receive:
    """Answer: the next message's bytes; None after `timeout` seconds; MISSED when messages may have been lost."""

    timeout: float


@dataclass(frozen=True, slots=True)
class Follow:
    """Receive, and hand the values that `told_by` makes of each message to the user as Tell does, until it makes None
    of one: the way of every token. `taken` is called when the user comes back for more. Answer: that message, or what
    else Receive answers.
    """

    timeout: float
    told_by: Callable[[Any], Sequence[Any] | None]
    taken: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask the database for a job's result. Answer: JobResult or None (also when no database is configured)."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand this value to the user, who may take his time."""

    value: Any


class Signal(Enum):
    MISSED = auto()


Effect: TypeAlias = RunScript | Commands | Listen | Receive | Follow | LookUp | Sleep | Tell
Program: TypeAlias = Generator[Effect, Any, T]
