"""Messages on a worker's control channel, and what a worker says of itself."""

import msgspec


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The job's sequence is to stop now."""

    job_id: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Stop intake and finish, as after SIGTERM."""


ControlMessage = Cancel | Drain


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's heartbeat value: who it is and how loaded it is."""

    worker_id: str
    model: str = ""
    version: str = ""
    started_ms: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    tokens_per_s: float = 0.0
    draining: bool = False
