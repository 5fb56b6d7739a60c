"""Every Redis key: its name, type, writer and end. All keys of one queue share the hash tag
`{queue}`, so that each script touches one slot of a cluster.

| key | type | written by | lives |
|---|---|---|---|
| `tm:{q}:jobs:<class>` | stream, group `workers` | submit, redrive, sweep | until finish, release |
| `tm:{q}:jobs:<class>:<tenant>` | stream of a named tenant, group `workers` | the same | the same |
| `tm:{q}:fair_shares:<class>` | sorted set tenant → virtual time | submit, claim | as jobs wait |
| `tm:{q}:job:<id>` | hash | scripts only | alive: until finish; then result TTL |
| `tm:{q}:log:<id>` | stream, entry id `<tokens so far>-0` | append | until finish; TTL meanwhile |
| `tm:{q}:chunks:<id>` | pub/sub channel | append, finish, cancel | – |
| `tm:{q}:idem:<tenant>:<key>` | fingerprint, space, id | submit, finish | until finish, then TTL |
| `tm:{q}:worker:<id>` | string | heartbeat | TTL = lease |
| `tm:{q}:workers` | set of worker ids seen alive | heartbeat, claim | until the worker is reaped |
| `tm:{q}:owned:<worker>` | set of job ids | claim, finish, release | until empty |
| `tm:{q}:ownership_versions` | hash worker id → number | append | until it loses a job or ends |
| `tm:{q}:control:<worker>` | pub/sub channel | submit, cancel, operators | – |
| `tm:{q}:ready` | sorted set worker id → free places, −ms if woken | claim, submit | TTL |
| `tm:{q}:ready:urgent` | the same, for interactive jobs alone | the same | the same |
| `tm:{q}:wake_up` | pub/sub channel | release, cancel, sweep | – |
| `tm:{q}:delayed` | sorted set job id → due ms | submit, retry | until due |
| `tm:{q}:deadlines` | sorted set job id → deadline ms | submit | until due or finished |
| `tm:{q}:requeued` | sorted set job id → class, age | release, sweep | until claimed, first |
| `tm:{q}:sessions` | hash session → worker id that had its last job | claim | TTL since use |
| `tm:{q}:old_sessions` | the 100,000 sessions before those | claim | the same |
| `tm:{q}:held:<class>` | sorted set job id → ms since it waits for a worker | claim | as it waits |
| `tm:{q}:held_for:<worker>` | sorted set: those of one worker | claim | TTL |
| `tm:{q}:unrecorded_ends` | sorted set job id → ended ms | cancel, sweep | until recorded |
| `tm:{q}:dead` | stream | dead-letter | until redriven or trimmed |
| `tm:{q}:tenants` | hash job id → its named tenant | claim | until finish, release; TTL |
| `tm:{q}:tenant:<tenant>` | hash: running, rate bucket, virtual time | scripts | TTL since use |
| `tm:{tenants}:limits` | hash: limits of tenants in every queue | operators | for ever |
| `tm:{q}:meta` | hash: counters, limits, settings of all tenants | scripts, operators | for ever |
"""

import re
from dataclasses import dataclass

from tokenmill_schemas.job import Priority

GROUP = "workers"


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of all Redis keys of one queue."""

    queue: str
    prefix: str = "tm:"

    @property
    def base(self) -> str:
        """The prefix `tm:{queue}:` of every key of the queue; scripts receive it as an argument."""
        return f"{self.prefix}{{{self.queue}}}:"

    def tenant_stream(self, priority: Priority, tenant: str = "") -> str:
        return f"{self.base}jobs:{priority.value}" + (f":{tenant}" if tenant else "")

    def fair_shares(self, priority: Priority) -> str:
        return f"{self.base}fair_shares:{priority.value}"

    def job(self, job_id: str) -> str:
        return f"{self.base}job:{job_id}"

    def log(self, job_id: str) -> str:
        return f"{self.base}log:{job_id}"

    def chunks(self, job_id: str) -> str:
        return f"{self.base}chunks:{job_id}"

    def idempotency(self, tenant: str, key: str) -> str:
        """Return the key of an idempotency key. Colons in the tenant's name are escaped: tenant `a`
        with key `b:c` must differ from tenant `a:b` with key `c`.
        """
        return f"{self.base}idem:{tenant.replace('%', '%25').replace(':', '%3A')}:{key}"

    def worker(self, worker_id: str) -> str:
        return f"{self.base}worker:{worker_id}"

    def owned(self, worker_id: str) -> str:
        return f"{self.base}owned:{worker_id}"

    def control(self, worker_id: str) -> str:
        return f"{self.base}control:{worker_id}"

    def tenant(self, tenant: str) -> str:
        return f"{self.base}tenant:{tenant}"

    @property
    def workers(self) -> str:
        return f"{self.base}workers"

    @property
    def ownership_versions(self) -> str:
        return f"{self.base}ownership_versions"

    @property
    def wake_up(self) -> str:
        return f"{self.base}wake_up"

    def idle_workers(self, *, urgent_only: bool = False) -> str:
        return f"{self.base}ready:urgent" if urgent_only else f"{self.base}ready"

    @property
    def delayed(self) -> str:
        return f"{self.base}delayed"

    @property
    def deadlines(self) -> str:
        return f"{self.base}deadlines"

    @property
    def requeued(self) -> str:
        return f"{self.base}requeued"

    @property
    def sessions(self) -> str:
        return f"{self.base}sessions"

    @property
    def old_sessions(self) -> str:
        return f"{self.base}old_sessions"

    def held(self, priority: Priority) -> str:
        return f"{self.base}held:{priority.value}"

    def held_for(self, worker_id: str) -> str:
        return f"{self.base}held_for:{worker_id}"

    @property
    def unrecorded_ends(self) -> str:
        return f"{self.base}unrecorded_ends"

    @property
    def dead(self) -> str:
        return f"{self.base}dead"

    @property
    def meta(self) -> str:
        return f"{self.base}meta"


def tenant_limits(prefix: str = "tm:") -> str:
    """Return the key of the limits that tenants have in every queue, also in later ones."""
    return f"{prefix}{{tenants}}:limits"


def queue_of(model: str) -> str:
    """Return the default queue of a model: the last part of its path, in lower case and without
    unusual characters.
    """
    name = re.split(r"[/\\]", model.rstrip("/\\"))[-1].removesuffix(".gguf").lower()
    return re.sub(r"[^a-z0-9._-]+", "-", name).strip("-") or "default"
