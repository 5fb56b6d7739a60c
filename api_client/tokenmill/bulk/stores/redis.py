"""Stores batches in Redis, when there is no database.

A batch is kept for a month after its last change, and results as long as Redis keeps any (an hour
by default). The keys are in schemas/tokenmill_schemas/keys.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from tokenmill.bulk.batch import Batch, BatchNotFound, BatchState, Totals
from tokenmill.bulk.formats.input_file import BadLine
from tokenmill.bulk.job_queries import send_commands
from tokenmill.bulk.pages import paged
from tokenmill.client import Client
from tokenmill.transport.scripts import Argument
from tokenmill_schemas.result import JobResult

KEPT_S: Final = 30 * 86_400
_MOVE: Final = """
local state = redis.call('HGET', KEYS[1], 'state')
for place = 4, #ARGV do
  if state == ARGV[place] then
    redis.call('HSET', KEYS[1], 'state', ARGV[1], ARGV[2], ARGV[3])
    return 1
  end
end
return 0
"""
_CREATE: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'state', ARGV[1], 'batch', ARGV[2])
end
"""
_FIELDS: Final = (
    "state", "batch", "submitted", "over_line", "totals", "seen", "in_progress", "finalizing",
    "cancelling", "finished",
)  # fmt: skip
_json: Final = msgspec.json.Encoder().encode
_batch: Final = msgspec.json.Decoder(Batch).decode
_totals: Final = msgspec.json.Decoder(Totals).decode
_bad_line: Final = msgspec.json.Decoder(BadLine).decode


class RedisBatchStore:
    """A store on the client's connection, which it leaves open."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._keys = client.keys
        self._index = client.keys.batches

    def create(self, batch: Batch) -> None:
        key = self._keys.batch(batch.id)
        self._do(
            ("EVAL", _CREATE, 1, key, batch.state.value, _json(batch)),
            ("ZADD", self._index, batch.created_ms, batch.id),
            ("EXPIRE", key, KEPT_S),
            ("EXPIRE", self._index, KEPT_S),
        )

    def get(self, batch_id: str) -> Batch:
        (found,) = self._read([batch_id])
        if found is None:
            raise BatchNotFound(batch_id)
        return found

    def newest(self, limit: int = 20, after: str | None = None) -> Sequence[Batch]:
        start = "+inf"
        if after is not None:
            start = f"({self.get(after).created_ms}"
        (ids,) = self._do(
            ("ZRANGE", self._index, start, "-inf", "BYSCORE", "REV", "LIMIT", 0, limit)
        )
        names = [name.decode() for name in ids]
        found = self._read(names)
        gone = [name for name, batch in zip(names, found, strict=True) if batch is None]
        if gone:
            self._do(("ZREM", self._index, *gone))
        return [batch for batch in found if batch is not None]

    def move(self, batch_id: str, state: BatchState, expected: Sequence[BatchState]) -> bool:
        moment = "finished" if state.is_final else state.value
        words = [word.value for word in expected]
        now_ms = self._client.clock.now_ms()
        (moved,) = self._do(
            ("EVAL", _MOVE, 1, self._keys.batch(batch_id), state.value, moment, now_ms, *words),
        )
        return bool(moved)

    def describe(self, batch: Batch) -> None:
        self._do(
            ("HSET", self._keys.batch(batch.id), "batch", _json(batch)), *self._renew(batch.id)
        )

    def progress(self, batch_id: str, *, submitted: int, over_line: int, totals: Totals) -> None:
        values = (
            "submitted",
            submitted,
            "over_line",
            over_line,
            "totals",
            _json(totals),
            "seen",
            self._client.clock.now_ms(),
        )
        self._do(("HSET", self._keys.batch(batch_id), *values), *self._renew(batch_id))

    def reject(self, batch_id: str, lines: Sequence[BadLine]) -> None:
        key = self._keys.refused(batch_id)
        for page in paged(lines):
            pairs = [part for bad in page for part in (bad.line, _json(bad))]
            self._do(("HSET", key, *pairs), ("EXPIRE", key, KEPT_S))

    def rejected(self, batch_id: str) -> Iterator[BadLine]:
        last = self.get(batch_id).last_line
        for numbers in paged(range(1, last + 1)):
            (values,) = self._do(("HMGET", self._keys.refused(batch_id), *numbers))
            yield from (_bad_line(value) for value in values if value is not None)

    def results(self, batch_id: str) -> Iterator[JobResult]:
        return iter(())

    def recorded(self, job_ids: Sequence[str]) -> dict[str, JobResult]:
        return {}

    def totals(self, batch: Batch, *, with_tokens: bool) -> Totals | None:
        return None

    def close(self) -> None:
        """Do nothing: the client owns the connection."""

    def _renew(self, batch_id: str) -> tuple[tuple[Argument, ...], ...]:
        return (
            ("EXPIRE", self._keys.batch(batch_id), KEPT_S),
            ("EXPIRE", self._keys.refused(batch_id), KEPT_S),
            ("EXPIRE", self._index, KEPT_S),
        )

    def _read(self, ids: Sequence[str]) -> list[Batch | None]:
        replies = self._do(*(("HMGET", self._keys.batch(name), *_FIELDS) for name in ids))
        return [_stored(values) for values in replies]

    def _do(self, *commands: tuple[Argument, ...]) -> Sequence[Any]:
        return self._client.perform(send_commands(commands))


def _stored(values: Sequence[bytes | None]) -> Batch | None:
    state, batch, submitted, over_line, totals, *times = values
    if state is None or batch is None:
        return None
    seen, started, finalizing, cancelling, finished = (int(value or 0) for value in times)
    return msgspec.structs.replace(
        _batch(batch),
        state=BatchState(state.decode()),
        submitted=int(submitted or 0),
        over_line=int(over_line or 0),
        totals=_totals(totals) if totals else Totals(),
        seen_ms=seen,
        started_ms=started,
        finalizing_ms=finalizing,
        cancelling_ms=cancelling,
        finished_ms=finished,
    )
