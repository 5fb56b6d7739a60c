"""Messages on a worker's control channel, and what a worker says of itself."""

import msgspec


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The job's sequence is to stop now."""

    job_id: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Stop intake and finish, as after SIGTERM."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A job came, and this worker is listed as having room: it claims. It is listed no more until that claim."""


ControlMessage = Cancel | Drain | Call


class TenantLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one tenant has of a worker."""

    running: int = 0
    tokens_per_s: float = 0.0


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's heartbeat value: who it is and how loaded it is, for people who look (`tokenmill top`).

    Times are milliseconds over the last minute, as (median, 95th percentile); None where nothing was timed.
    """

    worker_id: str
    model: str = ""
    version: str = ""
    started_ms: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    tokens_per_s: float = 0.0
    draining: bool = False
    max_running: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0  # free, but found again by what is in them
    prefix_hits: float | None = None  # share of the prompt tokens looked up that were found, since the start
    queue_ms: tuple[float, float] | None = None
    first_token_ms: tuple[float, float] | None = None
    token_ms: tuple[float, float] | None = None
    to_record: int = 0  # finished, and not acknowledged yet
    engine_restarts: int = 0
    problems: tuple[str, ...] = ()  # what /healthz complains of
    tenants: dict[str, TenantLoad] = {}  # the busiest ones
