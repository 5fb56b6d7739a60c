"""Hostile arguments to every script: either nothing is written and the reply names the argument, or
all is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.valkey import ControlledValkey
from tokenmill.transport import scripts as producer_scripts
from tokenmill.transport.scripts import COMMON, Script, call, load_script
from tokenmill_schemas.codec import encode
from tokenmill_schemas.job import PRIORITY_ORDER, JobRequest
from tokenmill_schemas.keys import Keys
from tokenmill_worker.queue import scripts as worker_scripts

pytestmark = pytest.mark.redis

KEYS = Keys("q")
HEAD = (KEYS.base, "PUBLISH")
FAR_AWAY_MS = 4_000_000_000_000
PLAY = load_script(COMMON, ("tokenmill", "in_memory_worker"))
HOSTILE: list[bytes] = [
    b"", b" ", b"-1", b"-0.5", b"0", b"1.5", b"inf", b"-inf", b"nan", b"1e400", b"1e15",
    b"9007199254740993", b"9" * 40,
    b"0x10", b" 7 ", b"text", b"urgent", b"FLUSHALL", b"SPUBLISH", b"a b", b"a\0b", b"\xff\xfe",
    b"x\r\n+OK\r\n",
    b"y" * 2_000, KEYS.meta.encode(), b"waits", b"runs", b"\x80", b"\x91\x01",
]  # fmt: skip
ARGUMENT = st.one_of(
    st.sampled_from(HOSTILE), st.binary(max_size=12), st.integers().map(lambda n: str(n).encode())
)


@dataclass(frozen=True)
class Case:
    """One valid call: names and values of its arguments, from ARGV[1] on. Options are one of them,
    a dictionary.
    """

    script: Script
    arguments: tuple[tuple[str, Any], ...]

    @property
    def names(self) -> list[str]:
        return ["key base", "publish command", *(name for name, _ in self.arguments)]

    @property
    def values(self) -> list[Any]:
        return [*HEAD, *(value for _, value in self.arguments)]

    @property
    def options(self) -> dict[str, Any]:
        return next((value for value in self.values if isinstance(value, dict)), {})


def job(name: str, **other: Any) -> tuple[tuple[str, Any], ...]:
    """The arguments of submit for one job."""
    fields: dict[str, Any] = {
        "id": name, "class": "standard", "tenant": "t", "fingerprint": f"print-{name}",
        "idempotency key": "",
        "request": encode(JobRequest(job_id=name, prompt="x")), "created": 1_000,
        "deadline": FAR_AWAY_MS, "due": 0, "cost": 10, "session": "s",
    }  # fmt: skip
    return tuple((fields | other).items())


def chunk(name: str, token: bytes) -> bytes:
    return bytes(msgpack.packb([name, token.decode(), 1, 1, 1, "chunk"]))


CLAIM_OPTIONS: dict[str, Any] = {
    "worker": "w1", "lease_ms": 10_000, "sweep_ms": 0, "credits": 1, "urgent_credits": 0,
    "max_reply_bytes": 10_000, "max_solo_crashes": 3, "max_crashes": 50, "max_orphaned": 10,
    "log_ttl_s": 600, "bulk_every": 8, "redeliver": 0,
}  # fmt: skip


def cases(tokens: dict[str, bytes]) -> dict[str, Case]:
    """Return calls of every script.

    Job `waits` is queued, w1 owns `runs`, `over` is dead; see `populated`.
    """
    running = tokens["runs"]
    found = [
        Case(producer_scripts.SUBMIT, (
            ("backlog limit", 100), ("idempotency TTL", 1_000),
            *job("new1", **{"idempotency key": "k"}),
            *job("new2", due=FAR_AWAY_MS, **{"class": "bulk"}), *job("waits"),
        )),
        Case(producer_scripts.CANCEL,
             (("job id", "waits"), ("job id", "runs"), ("job id", "nobody"))),
        Case(producer_scripts.REDRIVE, (("limit", 10), ("start", "-"), ("job id", "over"))),
        Case(producer_scripts.COLLECT, (
            ("time to keep", 60), ("number of jobs kept", 1), ("largest reply", 1_000),
            ("job id", "over"),
            ("job id", "waits"),
        )),
        Case(PLAY, (("move", "take"), ("job id", "waits"), ("worker", "w1"))),
        Case(PLAY, (("move", "append"), ("job id", "runs"), ("end of the log", 2), ("chunk", "c"),
                    ("publish", 1))),
        Case(PLAY, (("move", "finish"), ("job id", "runs"), ("state", "failed"), ("result", "r"),
                    ("last chunk", "c"))),
        Case(worker_scripts.CLAIM, (
            ("options", CLAIM_OPTIONS | {"credits": 5, "urgent_credits": 1, "redeliver": 1}),
            ("job id", "runs"),
        )),
        Case(worker_scripts.APPEND, (
            ("log TTL", 600), ("worker", "w1"), ("ownership version", 1),
            ("chunks", chunk("runs", running)),
        )),
        Case(worker_scripts.FINISH, (
            ("worker", "w1"), ("result TTL", 600), ("dead TTL", 600),
            ("job id", "runs"), ("token", running),
            ("state", "succeeded"), ("result", "r"), ("last chunk", "c"), ("tokens served", 5),
            ("job id", "waits"), ("token", "1"),
            ("state", "dead"), ("result", "r"), ("last chunk", "c"), ("tokens served", 5),
        )),
        Case(worker_scripts.RELEASE, (
            ("worker", "w1"), ("job id", "runs"), ("token", running),
            ("how", "retry"), ("delay", 1_000), ("note", "n"), ("job id", "waits"),
            ("token", "1"), ("how", "solo_crash"), ("delay", 0), ("note", ""),
        )),
        Case(worker_scripts.HEARTBEAT, (
            ("options", {"worker": "w1", "lease_ms": 10_000, "sweep_ms": 0}), ("status", "s"),
            ("job id", "runs"), ("token", running), ("job id", "x"), ("token", 1),
        )),
        Case(worker_scripts.RESIGN, (("worker", "w1"), ("how", "orphan"))),
    ]  # fmt: skip
    return {f"{place} {case.script.name}": case for place, case in enumerate(found)}


NAMES = list(cases({"runs": b"1"}))


def run(server: Any, script: Script, *arguments: Any) -> Any:
    return call(server, script, KEYS.meta, *HEAD, *packed(arguments))


def packed(arguments: Iterable[Any]) -> list[Any]:
    """Return the arguments as they are sent: options as MessagePack."""
    return [msgpack.packb(value) if isinstance(value, dict) else value for value in arguments]


def populated(server: Any) -> dict[str, bytes]:
    """Make one waiting, one running and one dead job; return the fencing tokens."""
    server.flushall()
    server.hset(KEYS.meta, "served", 1)  # else submit's reply has one word more
    tokens = {}
    for name in ("over", "runs", "waits"):
        values = [value for _, value in job(name)]
        assert run(server, producer_scripts.SUBMIT, 0, 0, *values) == [b"ok", name.encode(), b"new"]
        if name == "waits":
            break
        *_, delivery = run(server, worker_scripts.CLAIM, CLAIM_OPTIONS)
        tokens[name] = delivery[1]
        body = bytes(msgpack.packb([name, delivery[1].decode(), 0, 1, 1, "first"]))
        run(server, worker_scripts.APPEND, 600, "w1", 1, body)
        if name == "over":
            end = (name, delivery[1], "dead", "r", "c", 5)
            assert run(server, worker_scripts.FINISH, "w1", 600, 600, *end) == [1]
    return tokens


def everything(server: Any) -> dict[bytes, Any]:
    with server.pipeline(transaction=False) as pipe:
        for name in (names := server.keys("*")):
            pipe.dump(name)
        return dict(zip(names, pipe.execute(), strict=True))


def check_counts(server: Any) -> None:
    """Check that the counters agree with the jobs' hashes, and that every waiting job is found."""
    meta = server.hgetall(KEYS.meta)
    jobs = {name: server.hgetall(name) for name in server.keys(KEYS.job("*"))}
    findable = {name for key in (KEYS.delayed, KEYS.requeued) for name in server.zrange(key, 0, -1)}
    streams = [name for name in server.keys(KEYS.base + "jobs:*") if server.type(name) == b"stream"]
    findable |= {fields[b"job"] for stream in streams for _, fields in server.xrange(stream)}
    for priority in PRIORITY_ORDER:
        mine = [
            fields for fields in jobs.values() if fields.get(b"class") == priority.value.encode()
        ]
        waiting = [fields for fields in mine if fields[b"state"] == b"queued"]
        assert int(meta.get(b"queued:" + priority.value.encode(), 0)) == len(waiting)
        tokens = float(meta.get(b"queued_tokens:" + priority.value.encode(), 0))
        assert math.isclose(tokens, sum(float(fields[b"cost"]) for fields in waiting))
    for name, fields in jobs.items():
        assert b"state" in fields, (name, fields)
        if fields[b"state"] in (b"queued", b"scheduled"):
            assert name.removeprefix(KEYS.job("").encode()) in findable
    held = {job for name in server.keys(KEYS.owned("*")) for job in server.smembers(name)}
    assert int(meta.get(b"running", 0)) == len(held)
    assert set(server.hkeys(f"{KEYS.base}tenants")) == held, "all jobs here have a tenant"


def kinds_of(keys: set[bytes]) -> set[str]:
    """Return keys as the heads of the scripts write them: `job:` for `tm:{q}:job:x`."""
    names = {key.decode().removeprefix(KEYS.base) for key in keys}
    return {
        name if name == "ready:urgent" else re.sub(r"(?<=:).*", "", name, count=1) for name in names
    }


def listed_keys(script: Script) -> set[str]:
    """Return the keys that a script's head says it may write."""
    row = re.compile(r"^-- Keys(?: of a sweep)?  +(.+(?:\n--  +.+)*)", re.MULTILINE)
    rows = row.findall(script.text)
    own, sweep = rows[-1], rows[-2] if len(rows) > 2 else ""
    text = own + (sweep if "those of a sweep" in own else "")
    return set(re.findall(r"[a-z_]+:urgent|[a-z_]+:?", text))


@pytest.fixture(scope="module")
def server(valkey: ControlledValkey) -> Iterator[Any]:
    with valkey.client() as client:
        yield client
        client.flushall()


@pytest.mark.parametrize("name", NAMES)
def test_each_script_s_valid_call_succeeds(server: Any, name: str) -> None:
    case, before = cases(populated(server))[name], everything(server)
    call(server, case.script, KEYS.meta, *packed(case.values))
    after = everything(server)
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert kinds_of(changed) <= listed_keys(case.script)
    if case.script is not PLAY:  # it has no tenant streams and no owners
        check_counts(server)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_hostile_call_writes_all_or_nothing(server: Any, name: str, data: st.DataObject) -> None:
    case = cases(populated(server))[name]
    values, replaced = list(case.values), set()
    for place in data.draw(st.sets(st.integers(0, len(values) - 1), max_size=2), label="places"):
        values[place] = data.draw(ARGUMENT, label=case.names[place])
        replaced.add(case.names[place])
    if data.draw(st.booleans(), label="with another number of arguments"):
        cut = data.draw(st.integers(-len(values), 2), label="more")
        values = values[:cut] if cut < 0 else [*values, *["1"] * cut]
        replaced |= {"number of arguments", *case.names}
    if "options" in replaced:
        replaced |= set(case.options)
    check_call(server, case.script, values, replaced)


def check_call(server: Any, script: Script, values: list[Any], replaced: set[str]) -> bool:
    """Check the call's reply and what it wrote. Return whether it was refused: it wrote nothing."""
    before = everything(server)
    try:
        reply = call(server, script, KEYS.meta, *packed(values))
    except redis.ResponseError as error:
        words = str(error)
        assert words.startswith("INVALID "), words
        assert any(name in words for name in replaced), (words, replaced)
        assert everything(server) == before
        return True
    assert {key for key in server.keys("*") if not key.startswith(KEYS.base.encode())} == set()
    if script is producer_scripts.SUBMIT and reply[0] != b"ok":
        assert everything(server) == before
    if script is not PLAY:
        check_counts(server)
    return False


GOOD, NEXT = ["runs", "1", 1, 1, 1, "c"], ["runs", "1", 2, 1, 1, "d"]
NUMBERS, TEXTS = (2, 3, 4), (0, 1, 5)
SPOILT: list[Any] = [None, True, [], -1, 0.5, float("nan"), 2**40]
PLACES: list[tuple[int, Any]] = [(place, value) for place in (*NUMBERS, *TEXTS) for value in SPOILT]
SPOILT_CHUNKS: list[Any] = [
    None,
    7,
    "text",
    {"a": 1},
    [1],
    GOOD[:5],
    [*GOOD, None, *NEXT[1:]],
    *([*GOOD, *NEXT[:place], value, *NEXT[place + 1 :]] for place, value in PLACES),
    *([*GOOD, *NEXT[:place], "7", *NEXT[place + 1 :]] for place in NUMBERS),
    [*GOOD, *NEXT[:3], 0, *NEXT[4:]],
]


@pytest.mark.parametrize("chunks", SPOILT_CHUNKS, ids=repr)
def test_chunks_are_checked_before_the_first_is_written(server: Any, chunks: Any) -> None:
    token = populated(server)["runs"].decode()
    ours = (
        [token if value == "1" else value for value in chunks]
        if isinstance(chunks, list)
        else chunks
    )
    before = everything(server)
    with pytest.raises(redis.ResponseError, match=r"^INVALID chunks"):
        run(server, worker_scripts.APPEND, 600, "w1", 2, bytes(msgpack.packb(ours)))
    assert everything(server) == before


@pytest.mark.parametrize("name", NAMES)
def test_each_argument_is_tried_with_each_hostile_value(server: Any, name: str) -> None:
    for place in range(len(cases({"runs": b"1"})[name].values)):
        is_as_before = False
        for value in HOSTILE:
            if not is_as_before:
                tokens = populated(server)
            case = cases(tokens)[name]
            values = list(case.values)
            replaced = {case.names[place]} | (
                set(case.options) if values[place] == case.options else set()
            )
            values[place] = value
            is_as_before = check_call(server, case.script, values, replaced)


WITH_OPTIONS = [name for name, case in cases({"runs": b"1"}).items() if case.options]


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_each_option_is_tried_with_each_hostile_value(server: Any, name: str) -> None:
    for option in cases({"runs": b"1"})[name].options:
        is_as_before = False
        for value in (*HOSTILE, *(value.decode("latin-1") for value in HOSTILE), *SPOILT):
            if not is_as_before:
                tokens = populated(server)
            case = cases(tokens)[name]
            case.options[option] = value
            is_as_before = check_call(server, case.script, case.values, {option, "options"})


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_a_missing_option_is_refused_by_name(server: Any, name: str) -> None:
    tokens = populated(server)
    for option in cases({"runs": b"1"})[name].options:
        case = cases(tokens)[name]
        del case.options[option]
        before = everything(server)
        with pytest.raises(redis.ResponseError, match=rf"^INVALID {option} must be .*'nothing'"):
            call(server, case.script, KEYS.meta, *packed(case.values))
        assert everything(server) == before
