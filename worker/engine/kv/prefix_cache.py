"""Content hashes of full blocks, and the longest prefix that every layer group still holds.

A block's hash covers its parent's hash and its token ids, so equal hashes mean equal tokens from the
start. The chain's root covers what else decides the content: model, cache generation, tenant's salt, adapter
(with its version), each tagged and with its length, so that no value can pass for another. 256 bits: a
collision would hand one tenant another's context. It knows no devices; where blocks lie is the pools' business.
"""

import struct
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

from worker.engine.sequence import Sequence

_DIGEST_BYTES = 32

Present = Callable[[bytes], bool]


class BlockHasher:
    """Extends a sequence's hash chain; every full block is hashed once in its sequence's life."""

    def __init__(self, block_size: int, model_key: str) -> None:
        self._block_size = block_size
        self._model_key = model_key
        self._pack = struct.Struct(f"<{block_size}q").pack
        self.generation = 0  # raised when the weights change: nothing hashed before can be found again

    def extend(self, sequence: Sequence) -> list[bytes]:
        """The hashes of all full blocks of the tokens known by now."""
        hashes, ids, size = sequence.block_hashes, sequence.token_ids, self._block_size
        full = len(ids) // size
        if len(hashes) < full:
            parent = hashes[-1] if hashes else self._root(sequence)
            for start in range(len(hashes) * size, full * size, size):
                content = parent + self._pack(*ids[start : start + size])
                parent = blake2b(content, digest_size=_DIGEST_BYTES).digest()
                hashes.append(parent)
        return hashes

    def _root(self, sequence: Sequence) -> bytes:
        return root_hash(self._model_key, self.generation, sequence.cache_salt, sequence.adapter)


@lru_cache(maxsize=1024)
def root_hash(model_key: str, generation: int, cache_salt: str, adapter: str = "") -> bytes:
    """The parent of a sequence's first block."""
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"tokenmill-kv")
    tagged = (b"model", model_key), (b"generation", str(generation)), (b"salt", cache_salt), (b"adapter", adapter)
    for tag, value in tagged:
        data = value.encode("utf-8", "surrogatepass")
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def first_visible_block(position: int, window: int | None, block_size: int) -> int:
    """The first block that the query at `position` sees: it looks back over `window` tokens, itself included."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def longest_hit(
    hashes: list[bytes], limit: int, present: list[Present], windows: list[int | None], block_size: int
) -> int:
    """The most leading blocks (≤ limit) that can be taken from the cache in every layer group at once.

    A full-attention group needs all of them; a sliding group only those that the next query sees. A shorter
    prefix asks a sliding group for other blocks, hence the repetition until all groups agree.
    """
    found = limit
    for has, window in zip(present, windows, strict=True):
        if window is None:
            found = next((i for i in range(found) if not has(hashes[i])), found)
    agreed = False
    while not agreed and found:
        agreed = True
        for has, window in zip(present, windows, strict=True):
            if window is not None:
                shorter = _longest_sliding_hit(hashes, found, has, window, block_size)
                agreed = agreed and shorter == found
                found = shorter
    return found


def _longest_sliding_hit(hashes: list[bytes], limit: int, has: Present, window: int, block_size: int) -> int:
    """Searched from the right: the first run of blocks that reaches back to where the query after it stops seeing."""
    end = limit
    if first_visible_block(end * block_size, window, block_size) >= end:
        return end  # a window of one token: nothing before the query is seen
    for index in range(limit - 1, -1, -1):
        if not has(hashes[index]):
            end = index
        elif index <= first_visible_block(end * block_size, window, block_size):
            return end
    return 0
