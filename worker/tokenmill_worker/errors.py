"""Our own errors, by the person who must act. Library errors are translated into these where they
appear.

    TokenmillError          of the client: each message is one sentence for the person who must act
    ├── SettingsError       the user: nothing starts until every listed problem is solved
    ├── SchemaOutdated      the operator: `tokenmill db upgrade`; no worker starts without it
    ├── MissingPackage      the installer: the message names the extra
    ├── PortTaken           the operator: something else serves there
    ├── Replaced            the operator: two workers have one name; the first of them ends
    └── Unavailable         no person yet: the caller retries, without limit if a job depends on it
        ├── RedisUnavailable
        └── StoreUnavailable    the SQL store: down, locked, full, in failover, too slow

Some errors are outside the tree, because they are values, or belong to a part that does not import
this one: `schemas.JobError` (answers one job), `RequestError` (the engine refuses a request),
`EngineDied` (the worker restarts the engine), `DecodeError` (bytes are not what they should be).
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.errors import TokenmillError


class SettingsError(TokenmillError):
    """Settings are wrong. `problems` has one line for each, all of them at once."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(list(self.problems))

    def __str__(self) -> str:
        return "; ".join(self.problems)


class SchemaOutdated(TokenmillError):
    """The database lacks tables or columns that this version writes."""


class MissingPackage(TokenmillError):
    """An optional package is needed and not installed."""


class PortTaken(TokenmillError):
    """/metrics and the health pages cannot be served where the settings want them."""


class Replaced(TokenmillError):
    """Raised when a process that started later sends heartbeats under this worker's name: it owns
    the jobs held under that name.
    """

    def __str__(self) -> str:
        return (
            "a worker that started later has this one's name: "
            "each that runs needs a worker_id of its own"
        )


class Unavailable(TokenmillError):
    """Something outside is away for now; trying again later is the right answer.

    `is_misconfigured`: only a person can repair it (a wrong password, a database that does not
    exist). A start ends with it at once; a running worker keeps its jobs and tries again.
    """

    def __init__(self, message: str, *, is_misconfigured: bool = False) -> None:
        super().__init__(message)
        self.is_misconfigured = is_misconfigured


class RedisUnavailable(Unavailable):
    pass


class StoreUnavailable(Unavailable):
    pass
