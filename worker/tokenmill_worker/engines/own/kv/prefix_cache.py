"""Content hashes of full blocks, and the longest prefix that is cached in every layer group.

A block's hash covers its parent's hash and its token ids, so equal hashes mean equal tokens from
the start. The root of the chain covers what else decides the content: model, cache generation, the
tenant's salt, adapter with its version. Each value is tagged and prefixed with its length, so that
two different sets of values never give the same bytes. Hashes have 256 bits, because a collision
would show one tenant another tenant's context.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import lcm

from tokenmill_worker.contract.requests import MediaSpan
from tokenmill_worker.engines.own.config.cache import Window, first_visible
from tokenmill_worker.engines.own.sequence import Sequence

_DIGEST_BYTES = 32
_LEAST_SAVED = 64  # tokens: a checkpoint that saves fewer costs more than it gives

Present = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The cached prefix of a sequence.

    `num_tokens` is a whole number of blocks of every group, and less than the sequence's length:
    the last token is always computed, because its logits are needed. A prompt that is cached whole
    therefore computes its last block again, and no block is ever copied within the device.
    `pending` is the key of the deepest block of the prefix that a step in flight still has to fill.
    `checkpoints` are positions at which the sequence's recurrent states are worth keeping.
    """

    num_tokens: int
    pending: bytes | None = None
    checkpoints: tuple[int, ...] = ()


class BlockHasher:
    """Extends the hash chain of sequences; each full block is hashed once per sequence."""

    def __init__(self, block_size: int, model_key: str) -> None:
        self._block_size = block_size
        self._model_key = model_key
        self._pack = struct.Struct(f"<{block_size}q").pack
        self.generation = 0  # raised when the weights change, so that older hashes are not found

    def extend(self, sequence: Sequence) -> list[bytes]:
        """Hash the full blocks that are not hashed yet; return the hashes of all full blocks."""
        hashes, ids, size = sequence.block_hashes, sequence.token_ids, self._block_size
        full = len(ids) // size
        if len(hashes) < full:
            parent = hashes[-1] if hashes else self._root(sequence)
            for start in range(len(hashes) * size, full * size, size):
                content = parent + self._pack(*ids[start : start + size])
                if sequence.media:
                    content += _media_key(sequence.media, start, start + size)
                parent = blake2b(content, digest_size=_DIGEST_BYTES).digest()
                hashes.append(parent)
        return hashes

    def _root(self, sequence: Sequence) -> bytes:
        return root_hash(self._model_key, self.generation, sequence.cache_salt, sequence.adapter)


def _media_key(media: tuple[MediaSpan, ...], start: int, end: int) -> bytes:
    """Return what tells media apart that the tokens [start, end) stand for; their ids are equal."""
    return b"".join(
        b"\0".join((span.kind.encode(), str(span.start).encode(), span.digest))
        for span in media
        if span.start < end and start < span.start + span.length
    )


@lru_cache(maxsize=1024)
def root_hash(model_key: str, generation: int, cache_salt: str, adapter: str = "") -> bytes:
    """Return the hash that stands as parent of a sequence's first block."""
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"tokenmill-kv")
    tagged = (
        (b"model", model_key),
        (b"generation", str(generation)),
        (b"salt", cache_salt),
        (b"adapter", adapter),
    )
    for tag, value in tagged:
        data = value.encode("utf-8", "surrogatepass")
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def first_visible_block(position: int, window: Window | None, block_size: int) -> int:
    """Return the index of the first block that the query at `position` attends to."""
    return first_visible(position, window) // block_size


def longest_hit(
    limit: int,
    keys: list[list[bytes]],
    has: Present,
    windows: list[Window | None],
    block_sizes: list[int],
) -> int:
    """Return how many leading tokens (≤ limit) can be taken from the cache in every layer group.

    The result is a whole number of blocks of every group. A full-attention group needs all of these
    blocks, a group with a window only those that the next query sees. For a shorter prefix it needs
    other blocks, so the search repeats until all groups agree.

    Args:
        keys: by group, of all its blocks up to `limit`.
        has: whether the block with this key is present.
    """
    unit = lcm(*block_sizes)
    groups = list(zip(keys, windows, block_sizes, strict=True))
    found = limit // unit * unit
    for own, window, size in groups:
        if window is None:
            num_blocks = found // size
            num_blocks = next((i for i in range(num_blocks) if not has(own[i])), num_blocks)
            found = num_blocks * size // unit * unit
    agreed = False
    while not agreed:
        agreed = True
        for own, window, size in groups:
            if window is not None:
                shorter = _longest_visible_hit(found, own, has, window, size, unit)
                agreed = agreed and shorter == found
                found = shorter
    return found


def longest_prefix(
    limit: int,
    keys: list[list[bytes]],
    has: Present,
    windows: list[Window | None],
    block_sizes: list[int],
    has_state: Present | None,
) -> CachedPrefix:
    """Return the longest usable prefix, as `longest_hit`, and where to keep recurrent states.

    A model with such states uses a prefix at whose end they are kept. Those of a prompt's end serve
    a conversation's next turn. Those at the end of the cached blocks serve the prompts that share
    only these (the idea is Marconi's, arXiv 2411.19379).

    Args:
        has_state: whether the states after the block with this key are kept, of the first group;
            None: the model has none.
    """
    found = longest_hit(limit, keys, has, windows, block_sizes)
    if has_state is None:
        return CachedPrefix(found)
    unit = lcm(*block_sizes)
    start = next(
        (
            end
            for end in range(found, 0, -unit)
            if has_state(keys[0][end // block_sizes[0] - 1])
            and longest_hit(end, keys, has, windows, block_sizes) == end
        ),
        0,
    )
    wanted = sorted({found, limit // unit * unit})
    kept = tuple(end for end in wanted if end - start >= _LEAST_SAVED)
    return CachedPrefix(start, checkpoints=kept)


def deepest_visible(
    found: int,
    keys: list[list[bytes]],
    has: Present,
    windows: list[Window | None],
    block_sizes: list[int],
) -> bytes | None:
    """Return the key of the deepest block, of those that a prefix of `found` tokens takes from the
    cache, for which `has` is true.
    """
    matches = [
        (index * size, key)
        for own, window, size in zip(keys, windows, block_sizes, strict=True)
        for index, key in enumerate(own[: found // size], start=1)
        if index > first_visible_block(found, window, size) and has(key)
    ]
    return max(matches, default=(0, None))[1]


def _longest_visible_hit(
    limit: int, keys: list[bytes], has: Present, window: Window, block_size: int, unit: int
) -> int:
    """Return how many leading tokens (≤ limit), in whole units, a group with a window can take.

    Search from the right for the first run of cached blocks that covers what the query after it
    sees.
    """
    end, index = limit, limit // block_size - 1
    while index >= first_visible_block(end, window, block_size):
        if has(keys[index]):
            index -= 1
        else:
            end = index * block_size // unit * unit
            index = end // block_size - 1
    return end
