"""What append.lua is asked and what it answers: the call of every engine step, and the voucher that makes it cheap.

The server checks two things before it writes a chunk: that the job is still this worker's, and that the log's last
entry has the number that the chunk follows. Both are known where the worker has appended that entry itself and nothing
has happened since; the voucher, a number that both sides count up, tells them that nothing has.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, Final

from schemas.codec import encode
from worker.jobs import Append, AppendReply, Exceptions

_ARRAY, _TEXT, _UINT = 0xDD, 0xDB, 0xCE  # MessagePack: all of 32 bits
_LENGTH, _VALUES = struct.Struct(">BI"), struct.Struct(">BIBIBBI")
_PUBLISHED, _FOLLOWS = 1, 2
_VOUCHER_BITS: Final = 48  # it begins anywhere, so that no other process has its like; Lua counts exactly up to 2 ** 53


class AppendCalls:
    """One worker's, one at a time: `next_call`, then `settle` with its reply, or `fail`."""

    def __init__(self) -> None:
        self._voucher = random.SystemRandom().getrandbits(_VOUCHER_BITS)
        # Job → [number of the log's last entry, fencing token, how a chunk's values begin], as seen under this voucher.
        self._known: dict[str, list[Any]] = {}
        self._unknown: list[int] = []  # places of the others in the present call

    def next_call(self, items: Sequence[Append]) -> tuple[int, bytes]:
        """The voucher and one MessagePack array, six values for each chunk, put together by hand with every number in
        the width that holds any: an object for each value costs more than the chunk itself. Raises ValueError for a
        chunk that says nothing.
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
                    self.fail()
                    raise ValueError(f"a chunk of job {job_id} has neither a token nor an end")
                size = 1
            how = 0 if item.checkpoint else _PUBLISHED
            seen = known.get(job_id)
            if seen is not None and seen[0] == start and seen[1] == token:
                how |= _FOLLOWS
                seen[0] = start + size
                whose = seen[2]
            else:
                unknown.append(place)
                whose = _whose(job_id, token)
            # The chunk goes as text, whatever it holds: the server's library is older than the type for bytes.
            values = _VALUES.pack(_UINT, start, _UINT, size, how, _TEXT, len(body))
            parts += (whose, values, body)
        self._voucher += 1
        return self._voucher, b"".join(parts)

    def settle(self, items: Sequence[Append], reply: Sequence[Any]) -> Exceptions:
        """What became of the chunks of the last call."""
        known, learned = self._known, self._unknown
        if not reply and not learned:  # as a rule
            return {}
        if reply and reply[0] == -1:  # the voucher did not hold: only what this call has seen is known
            known.clear()
            reply, learned = reply[3:], list(range(len(items)))
        exceptions = {
            place: (AppendReply(word.decode()), int(end))
            for place, word, end in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
        }
        for place in learned:
            job_id, token = items[place].chunk.job_id, items[place].token
            known[job_id] = [items[place].end, token, _whose(job_id, token)]
        for place in exceptions:
            self.forget(items[place].chunk.job_id)
        return exceptions

    def fail(self) -> None:
        """Nothing is known of what the call has done."""
        self._known.clear()

    def forget(self, job_id: str) -> None:
        """It has left this worker's hands, or is in doubt."""
        self._known.pop(job_id, None)


def _whose(job_id: str, token: int) -> bytes:
    return encode(job_id) + encode(str(token))
