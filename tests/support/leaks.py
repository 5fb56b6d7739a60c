"""Finds keys that must not be left behind: without a TTL, and not lasting by
schemas/tokenmill_schemas/keys.py.

The patterns here are written from that table by hand and share no code with it: a key that the code
invents without saying so in the table is found.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import cast

import redis

_QUEUE_KEY = re.compile(r"^[^{]*\{(?P<queue>[^}]+)\}:(?P<rest>.+)$", re.DOTALL)

_LASTING = (
    re.compile(r"jobs:(interactive|standard|bulk)(:.+)?", re.DOTALL),
    re.compile(r"fair_shares:(interactive|standard|bulk)"),
    re.compile(r"workers"),
    re.compile(r"owned:.+|ownership_versions"),
    re.compile(r"delayed|deadlines|requeued|unrecorded_ends|held:(interactive|standard|bulk)"),
    re.compile(r"dead"),
    re.compile(r"meta|limits"),
)
_LIVE_STATES = frozenset({b"scheduled", b"queued", b"running", b"dead"})


def leaked_keys(client: "redis.Redis", allowed: Iterable[str] = ()) -> list[str]:
    """Return one line per key that would wrongly stay for ever.

    `allowed`: shell patterns of a test's own keys.
    """
    patterns = tuple(allowed)
    found = []
    for raw in cast("Iterable[bytes]", client.scan_iter(count=1_000)):
        name = raw.decode("utf-8", "backslashreplace")
        if client.ttl(raw) != -1 or any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        reason = _why_leaked(client, raw, name)
        if reason:
            found.append(f"{name}: {reason}")
    return sorted(found)


def _why_leaked(client: "redis.Redis", raw: bytes, name: str) -> str | None:
    match = _QUEUE_KEY.match(name)
    if match is None:
        return "has no time to live and belongs to no queue"
    rest = match["rest"]
    if rest.startswith("job:"):
        state, settled = cast("list[bytes | None]", client.hmget(raw, ["state", "settled"]))
        # over, and not yet in SQL
        waits_for_record = state in (b"cancelled", b"expired") and settled is None
        if state in _LIVE_STATES or waits_for_record:
            return None
        return f"is a job in state {state!r} without a time to live"
    if rest.startswith("idem:"):
        return _why_key_leaked(client, raw, name.removesuffix(rest))
    if any(pattern.fullmatch(rest) for pattern in _LASTING):
        return None
    return "has no time to live and is not on the list of lasting keys"


def _why_key_leaked(client: "redis.Redis", raw: bytes, base: str) -> str | None:
    """It lasts while its job is not recorded."""
    value = cast("bytes | None", client.get(raw)) or b""
    job = base.encode() + b"job:" + value.partition(b" ")[2]
    if client.exists(job) and not client.hexists(job, "settled"):
        return None
    return f"has no time to live, and its job {job!r} is over"
