"""Verifies the promises from outside: accepted jobs, subscribers' chunks, SQL rows, Redis keys.

Shares no code with the worker: rows are read with plain SQL, results as plain MessagePack, keys by
the names in the documents, and a job's expected answer comes from an undisturbed run.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import sqlalchemy

from tests.chaos.details import Details

Answer = tuple[tuple[tuple[int, ...], str], ...]  # (token ids, text) of each choice


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise. `kind` is what the report counts it as."""

    kind: Literal["loss", "duplicate", "wrong"]
    words: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


@dataclass(slots=True)
class Received:
    """The tokens, texts and end that one subscriber received of one job."""

    choices: dict[int, list[int]] = field(default_factory=lambda: collections.defaultdict(list))
    texts: dict[int, str] = field(default_factory=lambda: collections.defaultdict(str))
    thoughts: dict[int, str] = field(default_factory=lambda: collections.defaultdict(str))
    calls: dict[int, dict[int, str]] = field(default_factory=lambda: collections.defaultdict(dict))
    problems: list[str] = field(default_factory=list)
    status: str = ""
    position: str = "0"

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.choices.values())

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first choice."""
        return self.choices[0]

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def ended(self) -> bool:
        return bool(self.status)

    def receive(self, chunk: Any) -> None:
        if self.ended:
            self.problems.append("a chunk after the last one")
        had = len(self.choices[chunk.choice])
        if chunk.index != had:
            self.problems.append(
                f"a chunk at {chunk.index} of choice {chunk.choice} after {had} tokens"
            )
        self.position = chunk.position
        self.choices[chunk.choice] += chunk.token_ids
        self.texts[chunk.choice] += chunk.text
        self.thoughts[chunk.choice] += chunk.reasoning
        for delta in chunk.tool_calls:
            calls = self.calls[chunk.choice]
            calls[delta.index] = calls.get(delta.index, "") + delta.name + delta.arguments
        self.status = str(chunk.status.value) if chunk.status is not None else ""

    def answer(self, num_choices: int) -> Answer:
        return tuple((tuple(self.choices[i]), self.texts[i]) for i in range(num_choices))

    def has_details_of(self, details: Details) -> bool:
        """Return True if the thoughts and the calls are those of the result."""
        return all(
            self.thoughts[i] == thoughts
            and sorted(self.calls[i].values()) == sorted(map("".join, details.calls[i]))
            for i, thoughts in enumerate(details.thoughts)
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """The ways in which an accepted job may end.

    A job that succeeds gives all of `answer`; any other job gives at most its beginning.
    """

    answer: Answer
    prompt_tokens: int
    states: frozenset[str] = frozenset({"succeeded"})
    not_before_ms: int = 0
    stops: tuple[str, ...] = ()
    details: Details | None = None
    has_webhook: bool = False

    @classmethod
    def of(cls, result: Any, **changes: Any) -> Wanted:
        """Build the expectation from the client's result of an undisturbed run."""
        answer = tuple((tuple(choice.token_ids), choice.text) for choice in result.choices)
        details = Details.read(msgspec.msgpack.encode(result))
        return cls(answer, result.usage.prompt_tokens, details=details, **changes)


@dataclass(frozen=True, slots=True)
class Row:
    """A job's row in SQL."""

    state: str
    answer: Answer
    started_ms: int
    details: Details
    error: str = ""


def violations(
    database: str, wanted: dict[str, Wanted], received: dict[str, list[Received]]
) -> list[Violation]:
    """Return the broken promises.

    `wanted` names every accepted job and no other; `received` has what each of its subscribers
    received.
    """
    found: list[Violation] = []
    engine = sqlalchemy.create_engine(database)
    with engine.connect() as connection:
        columns = "select id, state, text, token_ids, started_ms, result, error_message from jobs"
        jobs = connection.execute(sqlalchemy.text(columns)).fetchall()
        columns = "select job_id, prompt_tokens, completion_tokens from usage"
        usage = connection.execute(sqlalchemy.text(columns)).fetchall()
        columns = "select job_id, event from webhooks"
        webhooks = connection.execute(sqlalchemy.text(columns)).fetchall()
    engine.dispose()
    found += _once("result", [row[0] for row in jobs], wanted)
    found += _once("usage", [row[0] for row in usage], wanted)
    rows = {
        job: Row(state, _answer_of(result), started, Details.read(result), error or "")
        for job, state, _, _, started, result, error in jobs
    }
    for job, _, text, token_ids, *_ in jobs:
        ids = tuple(json.loads(token_ids) if isinstance(token_ids, str) else token_ids or ())
        tokens, whole = (rows[job].answer or (((), ""),))[0]
        if (ids, text or "") != (tokens, whole.replace("\0", "\ufffd")):  # no column has a zero
            found.append(
                Violation("wrong", f"job {job}: the columns and the encoded result differ")
            )
    for job in wanted.keys() & rows.keys():
        found += _misanswered(job, rows[job], wanted[job])
    for job, prompt_tokens, completion_tokens in usage:
        if job in rows and job in wanted:
            found += _misbilled(job, rows[job], wanted[job], (prompt_tokens, completion_tokens))
    found += _miscalled(rows, wanted, [(job, event) for job, event in webhooks])
    for job, subscribers in received.items():
        for number, one in enumerate(subscribers):
            found += _misled(f"subscriber {number} of job {job}", one, rows.get(job))
    return found


def _once(name: str, ids: list[str], wanted: dict[str, Wanted]) -> Iterator[Violation]:
    counts = collections.Counter(ids)
    for job in wanted.keys() - counts.keys():
        yield Violation("loss", f"job {job} has no {name} row")
    for job, count in counts.items():
        if job not in wanted:
            yield Violation("duplicate", f"job {job} has a {name} row and was never accepted")
        elif count > 1:
            yield Violation("duplicate", f"job {job} has {count} {name} rows")


def _answer_of(result: bytes) -> Answer:
    decoded = msgspec.msgpack.decode(bytes(result))
    return tuple(
        (tuple(c.get("token_ids", ())), c.get("text", "")) for c in decoded.get("choices", ())
    )


def _misanswered(job: str, row: Row, wanted: Wanted) -> Iterator[Violation]:
    if row.state not in wanted.states:
        yield Violation(
            "wrong",
            f"job {job} is {row.state}, not {' or '.join(sorted(wanted.states))}: {row.error}",
        )
    elif row.state == "succeeded" and row.answer != wanted.answer:
        yield Violation("wrong", f"job {job}: the stored answer differs from the undisturbed run's")
    elif row.state == "succeeded" and wanted.details is not None:
        for name in wanted.details.differences(row.details):
            yield Violation("wrong", f"job {job}: the {name} differ from the undisturbed run's")
    elif not _begins(wanted.answer, row.answer, wanted.stops):
        yield Violation(
            "wrong",
            f"job {job} is {row.state} with an answer that the undisturbed run does not begin with",
        )
    if row.started_ms and row.started_ms < wanted.not_before_ms:
        yield Violation(
            "wrong", f"job {job} began {wanted.not_before_ms - row.started_ms} ms before it was due"
        )


def _begins(whole: Answer, part: Answer, stops: tuple[str, ...]) -> bool:
    return len(part) in (0, len(whole)) and all(
        have[0] == full[0][: len(have[0])] and _text_begins(full[1], have[1], stops)
        for have, full in zip(part, whole, strict=False)
    )


def _text_begins(whole: str, part: str, stops: tuple[str, ...]) -> bool:
    """A broken-off answer may end in the middle of a character, or of what would have become a stop
    string.
    """
    part = part.rstrip("\N{REPLACEMENT CHARACTER}")
    return whole.startswith(part) or any(
        part == whole + stop[:length] for stop in stops for length in range(1, len(stop))
    )


def _misbilled(job: str, row: Row, wanted: Wanted, billed: tuple[int, int]) -> Iterator[Violation]:
    generated = sum(len(token_ids) for token_ids, _ in row.answer)
    due = (wanted.prompt_tokens if generated else 0, generated)
    if billed != due:
        yield Violation("wrong", f"job {job}: billed {billed} tokens, not {due}")


def _miscalled(
    rows: dict[str, Row], wanted: dict[str, Wanted], webhooks: list[tuple[str, str]]
) -> Iterator[Violation]:
    """Compare the webhooks: one for each end of a job that asked for it, none for any other."""
    due = [
        (job, f"job.{row.state}")
        for job, row in rows.items()
        if job in wanted and wanted[job].has_webhook
    ]
    counts = collections.Counter(webhooks)
    for call in due:
        if not counts[call]:
            yield Violation("loss", f"job {call[0]} has no webhook {call[1]}")
    for call, count in counts.items():
        if count > 1 or call not in due:
            words = f"job {call[0]} has {count} webhooks {call[1]}, and may have "
            yield Violation("duplicate", words + ("one" if call in due else "none"))


def _misled(who: str, received: Received, row: Row | None) -> Iterator[Violation]:
    for problem in received.problems:
        yield Violation("duplicate", f"{who}: {problem}")
    if not received.ended:
        yield Violation("loss", f"{who} received no end")
    elif row is not None and received.status != row.state:
        yield Violation("wrong", f"{who} received the state {received.status}; it is {row.state}")
    elif row is not None and received.answer(len(row.answer)) != row.answer:
        sizes = [
            [(len(ids), len(text)) for ids, text in answer]
            for answer in (received.answer(len(row.answer)), row.answer)
        ]
        words = (
            f"{who} received another answer than the result: (tokens, characters) {sizes[0]}, "
            f"not {sizes[1]}"
        )
        yield Violation("loss", words)
    elif row is not None and not received.has_details_of(row.details):
        yield Violation("loss", f"{who} received other thoughts or calls than the result has")


# ── Redis ──


def left_in_redis(client: Any, queue: str, states: dict[str, str]) -> list[Violation]:
    """Return what a finished run has wrongly left in Redis.

    No job may wait or be owned, and the counters must agree with `states`, the jobs' states in SQL.
    """
    base = f"tm:{{{queue}}}:"
    found: list[Violation] = []
    for key in client.scan_iter(f"{_escaped(base)}*"):
        name = key.decode().removeprefix(base)
        sets = (
            "workers", "ownership_versions", "tenants", "requeued", "unrecorded_ends", "delayed",
        )  # fmt: skip
        if name.startswith(("log:", "owned:", "worker:", "held:")) or name in sets:
            found.append(Violation("wrong", f"{key.decode()} is left"))
        elif name.startswith("jobs:") and client.xlen(key):
            found.append(Violation("wrong", f"{key.decode()} still has {client.xlen(key)} entries"))
        elif name.startswith("tenant:") and int(client.hget(key, "running") or 0):
            found.append(Violation("wrong", f"{key.decode()} still counts running jobs"))
    if client.zcard(f"{base}deadlines"):
        found.append(Violation("wrong", "deadlines of finished jobs are left"))
    meta = {key.decode(): value.decode() for key, value in client.hgetall(f"{base}meta").items()}
    found += _miscounted(meta, collections.Counter(states.values()), client.xlen(f"{base}dead"))
    return found + list(_unsettled(client, base, states))


def _miscounted(
    meta: dict[str, str], ended: collections.Counter[str], num_dead: int
) -> Iterator[Violation]:
    for name in ("running", *(f"queued:{c}" for c in ("interactive", "standard", "bulk"))):
        if int(meta.get(name, 0)):
            yield Violation("wrong", f"the queue still counts {meta[name]} jobs as {name}")
    if int(meta.get("submitted", 0)) != ended.total():
        yield Violation(
            "duplicate",
            f"{meta.get('submitted', 0)} submissions were counted, {ended.total()} accepted",
        )
    for state in {
        name.removeprefix("finished:") for name in meta if name.startswith("finished:")
    } | ended.keys():
        count = int(meta.get(f"finished:{state}", 0))
        if count != ended[state]:
            kind: Literal["duplicate", "loss"] = "duplicate" if count > ended[state] else "loss"
            yield Violation(kind, f"{count} jobs were settled as {state}; SQL has {ended[state]}")
    if num_dead != ended["dead"]:
        yield Violation("wrong", f"{num_dead} dead letters for {ended['dead']} dead jobs")


def _unsettled(client: Any, base: str, states: dict[str, str]) -> Iterator[Violation]:
    jobs = list(states)
    for first in range(0, len(jobs), 500):
        group = jobs[first : first + 500]
        with client.pipeline(transaction=False) as pipeline:
            for job in group:
                pipeline.hmget(f"{base}job:{job}", "state", "settled")
            for job, (state, settled) in zip(group, pipeline.execute(), strict=True):
                if not settled or state.decode() != states[job]:
                    yield Violation(
                        "wrong",
                        f"job {job} is {state} (settled: {settled}) in Redis, {states[job]} in SQL",
                    )


def states_of(database: str, queue: str) -> dict[str, str]:
    engine = sqlalchemy.create_engine(database)
    with engine.connect() as connection:
        rows: Iterable[Any] = connection.execute(
            sqlalchemy.text("select id, state from jobs where queue = :queue"), {"queue": queue}
        ).fetchall()
    engine.dispose()
    return {row[0]: row[1] for row in rows}


def _escaped(pattern: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in pattern)
