"""The blocks of one layer group: who holds them, which are free, and which free ones are still findable.

Free blocks form a doubly linked list threaded through two integer lists, block 0 (never allocated) being
its head; taking a block out of the middle on a cache hit is O(1) and allocates nothing. A freed block
whose content is known by its hash keeps it until it is taken again:

    next to be taken ── unhashed, last freed first ── hashed, least recently used first ── last to be taken

It knows block ids and hashes, neither sequences' tokens nor devices.
"""

from collections.abc import Callable

from worker.engine.sequence import Sequence


class BlockPool:
    """Reference-counted blocks. A *fenced* block has a hash, but its owner's step has not yet filled it."""

    __slots__ = (
        "_next",
        "_on_evict",
        "_prev",
        "cached",
        "evicted",
        "fenced",
        "frees",
        "hashes",
        "num_blocks",
        "num_findable",
        "num_free",
        "refs",
    )

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes, int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._next: list[int] = [*range(1, num_blocks), 0]
        self._prev: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self._on_evict = on_evict
        self.refs = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.cached: dict[bytes, int] = {}  # hash → the block that has (or, if fenced, will have) this content
        self.fenced: dict[int, Sequence] = {}  # block → the sequence whose step fills it
        self.num_free = num_blocks - 1
        self.num_findable = 0  # free blocks with a hash
        self.frees = 0  # running count, so that a refused admission is retried only once something was freed
        self.evicted = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def allocate(self) -> int:
        """Take the free block that is missed least; its hash, if any, is dropped. The caller checked `num_free`."""
        block = self._next[0]
        if not block:
            raise RuntimeError("allocate() on an empty pool")
        self._unlink(block)
        self.refs[block] = 1
        found = self.hashes[block]
        if found is not None:
            self.num_findable -= 1
            self.hashes[block] = None
            del self.cached[found]
            self.evicted += 1
            if self._on_evict is not None:
                self._on_evict(found, block)
        return block

    def share(self, block: int) -> None:
        """Hold a block that is in use, or revive a free one that a hash found."""
        if not self.refs[block]:
            self._unlink(block)
            self.num_findable -= 1
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Let go of a block; the last holder frees it. Release a sequence's tail first, so that it is evicted first."""
        refs = self.refs[block] - 1
        if refs < 0:
            raise RuntimeError(f"block {block} is released more often than it was taken")
        self.refs[block] = refs
        if refs:
            return
        if block in self.fenced:
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
            self.num_findable += 1
        self.num_free += 1
        self.frees += 1

    def fence(self, block: int, content: bytes, owner: Sequence) -> None:
        """Register a block that `owner` is about to fill; the first block of a content keeps the hash."""
        if content not in self.cached and self.hashes[block] is None:
            self.cached[content] = block
            self.hashes[block] = content
            self.fenced[block] = owner

    def publish(self, block: int, content: bytes) -> None:
        """The block holds this content: lift its fence, or register it."""
        if block in self.fenced:
            del self.fenced[block]
        elif self.hashes[block] is None and content not in self.cached:
            self.cached[content] = block
            self.hashes[block] = content

    def forget(self, block: int) -> None:
        """Un-register a block in use, e.g. because the step that should have filled it failed."""
        content = self.hashes[block]
        if content is not None:
            self.hashes[block] = None
            del self.cached[content]
            self.fenced.pop(block, None)

    def forget_all(self) -> None:
        """Drop every hash: what the blocks hold must not be found any more (the weights changed)."""
        for block in list(self.cached.values()):
            free = not self.refs[block]
            self.forget(block)
            if free:  # to the unhashed end of the list
                self.share(block)
                self.release(block)

    def free_blocks(self) -> list[int]:
        """In the order in which they would be taken; O(free), for checks."""
        found, block = [], self._next[0]
        while block:
            found.append(block)
            block = self._next[block]
        return found

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1
