"""Encodes the call of append.lua, once per engine step, and reads its reply.

A chunk may be written only if the job still belongs to this worker, and if the log's last entry has
the number that the chunk follows. Both are certain if this worker appended that entry itself and
nothing changed its jobs since. The ownership version is a number that both sides raise by one with
each call. Equal numbers prove that nothing changed, and the script skips both checks.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, Final

from tokenmill_schemas.codec import encode
from tokenmill_worker.jobs import AppendFailures, AppendReply, ChunkAppend

_ARRAY, _TEXT, _UINT = 0xDD, 0xDB, 0xCE  # MessagePack: all of 32 bits
_LENGTH, _VALUES = struct.Struct(">BI"), struct.Struct(">BIBIBBI")
_PUBLISHED, _FOLLOWS = 1, 2
# A random start, so that no two processes share a version. Lua is exact up to 2 ** 53.
_VERSION_BITS: Final = 48


class AppendBatch:
    """Encodes the append calls of one worker, one at a time: `pack`, then `apply_reply`, or
    `reset` if there is no reply.
    """

    def __init__(self) -> None:
        self._version = random.SystemRandom().getrandbits(_VERSION_BITS)
        # Job → [number of the log's last entry, fencing token, owner prefix], as of this version.
        self._known: dict[str, list[Any]] = {}
        # Indices in the current call of chunks whose job is not known.
        self._unknown: list[int] = []

    def pack(self, items: Sequence[ChunkAppend]) -> tuple[int, bytes]:
        """Return the ownership version and one MessagePack array with six values per chunk. The
        array is packed by hand with every number in 32 bits: an object per value would cost more
        than the chunk itself. Raises ValueError for a chunk that has neither a token nor an end.
        """
        known, unknown = self._known, self._unknown
        unknown.clear()
        parts = [_LENGTH.pack(_ARRAY, 6 * len(items))]
        for place, item in enumerate(items):
            chunk, token = item.chunk, item.token
            job_id, start, body = chunk.job_id, item.start, encode(chunk)
            size = len(chunk.token_ids)
            if not size:
                if chunk.finish_reason is None:
                    self.reset()
                    raise ValueError(f"a chunk of job {job_id} has neither a token nor an end")
                size = 1
            how = 0 if item.checkpoint else _PUBLISHED
            seen = known.get(job_id)
            if seen is not None and seen[0] == start and seen[1] == token:
                how |= _FOLLOWS
                seen[0] = start + size
                owner = seen[2]
            else:
                unknown.append(place)
                owner = owner_prefix(job_id, token)
            # The chunk's bytes are sent as text: the server's MessagePack library has no bytes.
            values = _VALUES.pack(_UINT, start, _UINT, size, how, _TEXT, len(body))
            parts += (owner, values, body)
        self._version += 1
        return self._version, b"".join(parts)

    def apply_reply(self, items: Sequence[ChunkAppend], reply: Sequence[Any]) -> AppendFailures:
        """Apply the reply to the last call. Return the chunks that were not simply logged, see
        `tokenmill_worker.jobs.AppendFailures`.
        """
        known, learned = self._known, self._unknown
        if not reply and not learned:  # the usual case
            return {}
        if reply and reply[0] == -1:  # the versions differed: only this call's results are known
            known.clear()
            reply, learned = reply[3:], list(range(len(items)))
        failures = {
            place: (AppendReply(word.decode()), int(end))
            for place, word, end in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
        }
        for place in learned:
            job_id, token = items[place].chunk.job_id, items[place].token
            known[job_id] = [items[place].end, token, owner_prefix(job_id, token)]
        for place in failures:
            self.forget(items[place].chunk.job_id)
        return failures

    def reset(self) -> None:
        """Forget all jobs, because the outcome of the call is unknown."""
        self._known.clear()

    def forget(self, job_id: str) -> None:
        """Forget a job that has left this worker, or whose log is in doubt."""
        self._known.pop(job_id, None)


def owner_prefix(job_id: str, token: int) -> bytes:
    """Return the first two of a chunk's six values, packed: job id and fencing token."""
    return encode(job_id) + encode(str(token))
