"""The blocks of all layer groups: reference counts, the free list, and the keys of cached blocks.

Free blocks form a doubly linked list in two integer lists. Block 0, which is never allocated, is
its head. Taking a block out of the middle on a cache hit is O(1) and allocates nothing. A freed
block whose content hash is known keeps the hash until the block is allocated again:

    allocated next ── unhashed, last freed first
                   ── hashed, least recently used first ── allocated last
"""

from collections.abc import Callable

from tokenmill_worker.engines.own.sequence import Sequence


class BlockPool:
    """Reference-counted blocks, with the keys of those whose content is known.

    A key is the hash of a full block's content; the caller makes it different for each layer group.
    A *reserved* block has a hash, but the step that fills it has not succeeded yet. `on_fill` and
    `on_evict` are called with a key and its block: when a step has filled it, and before it is
    allocated for other content.
    """

    __slots__ = (
        "_next",
        "_on_evict",
        "_on_fill",
        "_prev",
        "cached",
        "evicted",
        "frees",
        "hashes",
        "num_blocks",
        "num_free",
        "num_free_cached",
        "refs",
        "reserved",
    )

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[bytes, int], None] | None = None,
        on_fill: Callable[[bytes, int], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._next: list[int] = [*range(1, num_blocks), 0]
        self._prev: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self._on_evict = on_evict
        self._on_fill = on_fill
        self.refs = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        # hash → block with this content; a reserved block is not yet filled
        self.cached: dict[bytes, int] = {}
        self.reserved: dict[int, Sequence] = {}  # block → the sequence whose step fills it
        self.num_free = num_blocks - 1
        self.num_free_cached = 0  # free blocks with a hash
        self.frees = 0  # releases so far; a refused admission is retried only when it has grown
        self.evicted = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def allocate(self) -> int:
        """Take the block at the head of the free list and return its id.

        Unhashed blocks come first, then the least recently used hashed one, whose hash is dropped.
        The caller has checked `num_free`.
        """
        block = self._next[0]
        if not block:
            raise RuntimeError("allocate() on an empty pool")
        self._unlink(block)
        self.refs[block] = 1
        found = self.hashes[block]
        if found is not None:
            self.num_free_cached -= 1
            self.hashes[block] = None
            del self.cached[found]
            self.evicted += 1
            if self._on_evict is not None:
                self._on_evict(found, block)
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block in use, or take a free block that was found by its hash."""
        if not self.refs[block]:
            self._unlink(block)
            self.num_free_cached -= 1
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference; the last one frees the block.

        Release the last blocks of a sequence first, so that they are evicted first.
        """
        refs = self.refs[block] - 1
        if refs < 0:
            raise RuntimeError(f"block {block} is released more often than it was taken")
        self.refs[block] = refs
        if refs:
            return
        if block in self.reserved:
            self.forget(block)
        after, before = self._next, self._prev
        if self.hashes[block] is None:
            first = after[0]
            after[block], before[block] = first, 0
            after[0] = before[first] = block
        else:
            last = before[0]
            after[block], before[block] = 0, last
            before[0] = after[last] = block
            self.num_free_cached += 1
        self.num_free += 1
        self.frees += 1

    def reserve_hash(self, block: int, content: bytes, owner: Sequence) -> None:
        """Register the hash of a new block that `owner` will fill.

        If another block has this content already, that block keeps the hash.
        """
        if content not in self.cached:
            self.cached[content] = block
            self.hashes[block] = content
            self.reserved[block] = owner

    def is_reserved(self, key: bytes) -> bool:
        """Return whether the block with this hash is still to be filled."""
        return self.cached.get(key) in self.reserved

    def commit_hash(self, block: int, content: bytes) -> None:
        """Mark the block as filled: its reserved hash counts now, or `content` is registered."""
        if block in self.reserved:
            del self.reserved[block]
        elif self.hashes[block] is None and content not in self.cached:
            self.cached[content] = block
            self.hashes[block] = content
        else:
            return
        if self._on_fill is not None:
            self._on_fill(content, block)

    def forget(self, block: int) -> None:
        """Remove the hash of a block, for example because the step that fills it failed."""
        content = self.hashes[block]
        if content is not None:
            self.hashes[block] = None
            del self.cached[content]
            self.reserved.pop(block, None)

    def forget_all(self) -> None:
        """Drop every hash, so that no cached block is found any more (the weights changed)."""
        for block in list(self.cached.values()):
            free = not self.refs[block]
            self.forget(block)
            if free:  # move it to the unhashed end of the list
                self.share(block)
                self.release(block)

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1
