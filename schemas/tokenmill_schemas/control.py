"""Messages on a worker's control channel, and the status that a worker reports."""

import msgspec


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop this job's sequence now."""

    job_id: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Stop claiming jobs and finish the running ones, as after SIGTERM."""


class WakeUp(msgspec.Struct, frozen=True, tag="call"):
    """Claim: a job has arrived while this worker was registered as idle.

    The worker is not registered again before that claim.
    """


ControlMessage = Cancel | Drain | WakeUp


class TenantLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of one tenant on one worker: running jobs and tokens a second."""

    running: int = 0
    tokens_per_s: float = 0.0


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a worker's heartbeat: its identity and its load, shown by `tokenmill top`.

    Times are milliseconds over the last minute, as (median, 95th percentile); None when nothing was
    timed.
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
    prefix_hits: float | None = None  # share of the looked-up prompt tokens found, since start
    queue_ms: tuple[float, float] | None = None
    first_token_ms: tuple[float, float] | None = None
    token_ms: tuple[float, float] | None = None
    to_record: int = 0  # finished, and not acknowledged yet
    engine_restarts: int = 0
    problems: tuple[str, ...] = ()  # what /healthz complains of
    tenants: dict[str, TenantLoad] = {}  # the busiest ones
    max_model_len: int = 0  # tokens of a prompt and its answer together
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters that jobs may ask for
    aliases: dict[str, str] = {}  # further names that jobs may use: of the model or of an adapter
    pace: float = 0.0  # estimated tokens of the jobs that it ended, per second of the last minute
    urgent: int = 0  # its running jobs that are no bulk jobs
