"""Effects: the input and output that an operation of the client requests.

Operations are generators (programs). They yield effects and are sent the answers. `Client` and
`AsyncClient` each execute the effects in their own way, so that everything else is written once.

If an effect fails because of the server, QueueUnavailable is raised inside the program;
InvalidRequest if a script rejects an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from tokenmill.errors import TokenmillError
from tokenmill.transport.scripts import Argument, Script
from tokenmill_schemas.keys import Keys

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueView:
    """The keys of a queue, and the limits and times that a client applies to it.

    `queue_limit` and `idempotency_ttl_s`: 0 uses the queue's own setting. `idle_s`: seconds of
    silence after which a stream reads the log. `patience_s`: seconds for which a stream that was
    connected waits for a lost server, and for the record of a job that the server lost.
    `on_trouble` is called once per error that is waited out. `unserved_s` limits the wait in a
    queue that no worker has ever served; None: no limit.
    """

    keys: Keys
    queue_limit: int = 0
    idempotency_ttl_s: float = 0.0
    idle_s: float = 5.0
    patience_s: float = 120.0
    on_trouble: Callable[[TokenmillError], None] | None = None
    unserved_s: float | None = 120.0


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


Effect: TypeAlias = RunScript | Commands | Listen | Receive | Follow | LookUp | Sleep | Tell
Program: TypeAlias = Generator[Effect, Any, T]
