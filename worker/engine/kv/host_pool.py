"""Host block ids of one layer group: preempted sequences' blocks, and the prefix cache's second tier.

A preempted sequence holds its host blocks until it is back on the device. Evicted prefix blocks are kept
by hash, least recently used first to go, whenever somebody needs their place. A host block that a step in
flight still reads is *pinned*. It moves no bytes: the plan's copies do.
"""

from collections import OrderedDict


class HostPool:
    """Every block is free, held by a sequence, or kept by hash (and then maybe pinned)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: set[int] = set()
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that a sequence could take now, those kept by hash included."""
        return len(self._free) + len(self._kept) - sum(1 for block in self._pins if block in self._hash_of)

    def take(self) -> int | None:
        """A block for a preempted sequence; None if there is none."""
        block = self._free.pop() if self._free else self._evict()
        if block is not None:
            self._held.add(block)
        return block

    def give_back(self, block: int) -> None:
        self._held.remove(block)
        self._free.append(block)

    def keep(self, content: bytes) -> int | None:
        """A block that will hold an evicted prefix block; None if it is kept already, or nothing can give way."""
        if content in self._kept:
            self._kept.move_to_end(content)
            return None
        block = self._free.pop() if self._free else self._evict()
        if block is not None:
            self._kept[content] = block
            self._hash_of[block] = content
        return block

    def find(self, content: bytes) -> int | None:
        return self._kept.get(content)

    def __contains__(self, content: bytes) -> bool:
        return content in self._kept

    def pin(self, block: int) -> None:
        """A planned step reads or writes it: nobody else may have it before that step is over."""
        self._pins[block] = self._pins.get(block, 0) + 1
        content = self._hash_of.get(block)
        if content is not None:
            self._kept.move_to_end(content)

    def unpin(self, block: int) -> None:
        if self._pins[block] == 1:
            del self._pins[block]
        else:
            self._pins[block] -= 1

    def forget(self, content: bytes) -> None:
        """What was to be kept under this hash is not to be trusted (the step that should have written it failed)."""
        block = self._kept.pop(content, None)
        if block is not None:
            del self._hash_of[block]
            self._free.append(block)

    def forget_all(self) -> None:
        for content in list(self._kept):
            self.forget(content)

    def _evict(self) -> int | None:
        for content, block in self._kept.items():
            if block not in self._pins:
                del self._kept[content]
                del self._hash_of[block]
                return block
        return None

    def held_blocks(self) -> list[int]:
        return sorted(self._held)

    def check(self) -> None:
        """Raises AssertionError when a block is lost or in two places."""
        everywhere = sorted([*self._free, *self._held, *self._hash_of])
        if everywhere != list(range(self.num_blocks)):
            raise AssertionError(f"host blocks are lost or in two places: {everywhere}")
        if {block: content for content, block in self._kept.items()} != self._hash_of:
            raise AssertionError("the host pool's two maps of hashes differ")
