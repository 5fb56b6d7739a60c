"""IO requests: the input and output that an operation of the client asks for.

Operations are generators. They yield IO requests and are sent the replies. `Client` and
`AsyncClient` each execute the requests in their own way, so that everything else is written once.

If a request fails because of the server, QueueUnavailable is raised inside the operation;
InvalidRequest if a script rejects an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from tokenmill.errors import TokenmillError
from tokenmill.transport.connect import Link
from tokenmill.transport.scripts import Argument, Script
from tokenmill_schemas.keys import Keys

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of a client.

    Args:
        link: options of the connections. Its retries are safe, because every call of the client
            may be repeated.
        queue_limit: waiting jobs of one priority above which submit raises QueueFull; the queue's
            own limit applies too. 0: only that one.
        idempotency_ttl_s: seconds for which an idempotency key is kept after its job has ended;
            0: the queue's own setting.
        idle_s: seconds of silence after which a stream reads the job's log.
        retry_for_s: seconds for which a call that was connected waits for a lost server, and for
            the record of a job that the server lost.
        on_trouble: called once per error that is waited out, and with QueueUnserved after the first
            submit to a queue that no worker has ever served.
        unserved_s: seconds for which a job may wait in such a queue before stream and result raise
            QueueUnserved; None: no limit.
    """

    link: Link = field(default_factory=lambda: Link(retries=3, client_name="tokenmill"))
    queue_limit: int = 0
    idempotency_ttl_s: float = 0.0
    idle_s: float = 5.0
    retry_for_s: float = 120.0
    on_trouble: Callable[[TokenmillError], None] | None = None
    unserved_s: float | None = 120.0


@dataclass(frozen=True, slots=True)
class QueueContext:
    """The keys of a queue, and the options of the client."""

    keys: Keys
    options: ClientOptions = ClientOptions()


@dataclass(frozen=True, slots=True)
class RunScript:
    """Run a Lua script. Reply: the script's."""

    script: Script
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Commands:
    """Send several commands in one round trip, in order. Reply: their raw replies.

    `tolerant`: a command that the server refuses has the exception as its reply, and the other
    commands have theirs.
    """

    commands: tuple[tuple[Argument, ...], ...]
    tolerant: bool = False


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Open the operation's subscription, or open it again. Reply: None, once the server has
    confirmed it.
    """

    channel: str


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message. Reply: the next message's bytes; None after `timeout` seconds; MISSED if
    messages may have been lost.

    AsyncClient looks at all silent jobs together, and lets one that has not changed wait on, until
    `limit` seconds have passed.
    """

    timeout: float
    limit: float


@dataclass(frozen=True, slots=True)
class StreamMessages:
    """Receive messages, and emit the values that `values_of` makes of each, as Emit does.

    It ends at the first message of which `values_of` makes None. Every streamed token takes this
    path. `on_taken` is called when the caller asks for the next value. Reply: the message at which
    it ended, or another reply of Receive.
    """

    timeout: float
    limit: float
    values_of: Callable[[Any], Sequence[Any] | None]
    on_taken: Callable[[], None]


@dataclass(frozen=True, slots=True)
class QueryDatabase:
    """Look up a job's result in SQL. Reply: JobResult; None without a row or a database."""

    job_id: str


@dataclass(frozen=True, slots=True)
class ServerTime:
    """Ask for the server's time. Reply: Unix milliseconds, from the client's clock, which is set by
    the server's once a minute at most.
    """


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Emit:
    """Give a value to the caller, which may take any time before it continues."""

    value: Any


IORequest: TypeAlias = (
    RunScript
    | Commands
    | Subscribe
    | Receive
    | StreamMessages
    | QueryDatabase
    | ServerTime
    | Sleep
    | Emit
)
Operation: TypeAlias = Generator[IORequest, Any, T]


def ask(request: IORequest) -> Operation[Any]:
    """Return the reply to one request: the shortest operation."""
    return (yield request)


def server_time() -> Operation[int]:
    """Return the server's time in Unix milliseconds."""
    return ask(ServerTime())
