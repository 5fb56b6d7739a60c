"""Host block ids: those of preempted sequences, and the prefix cache's second tier.

A preempted sequence holds its host blocks until it is back on the device. Evicted prefix blocks are
kept by hash; when a block is needed and none is free, the least recently used of them goes. A
*pinned* host block is still used by a step in flight, or written to the disk, and is not evicted.
Only ids are kept here: the copies of the step plan move the bytes.
"""

from collections import OrderedDict


class HostPool:
    """Block ids; each is free, held by a sequence or by a read from the disk, kept by hash (and
    then possibly pinned), or leaving: its hash was forgotten while it was pinned.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: set[int] = set()
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}
        self._leaving: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of blocks that sequences could take now, unpinned ones kept by hash included."""
        return (
            len(self._free)
            + len(self._kept)
            - sum(1 for block in self._pins if block in self._hash_of)
        )

    def take(self) -> int | None:
        """Take a block for a preempted sequence; return None if there is none."""
        block = self._free.pop() if self._free else self._evict()
        if block is not None:
            self._held.add(block)
        return block

    def give_back(self, block: int) -> None:
        self._held.remove(block)
        self._free.append(block)

    def keep(self, content: bytes) -> int | None:
        """Take a block for an evicted prefix block and return its id.

        Return None if this content is kept already, or if no block is free and none can be evicted.
        """
        if content in self._kept:
            self._kept.move_to_end(content)
            return None
        block = self._free.pop() if self._free else self._evict()
        if block is not None:
            self._kept[content] = block
            self._hash_of[block] = content
        return block

    def adopt(self, content: bytes, block: int) -> None:
        """Keep a held block by hash: it was filled with this content."""
        self._held.remove(block)
        if content in self._kept:
            self._free.append(block)
            return
        self._kept[content] = block
        self._hash_of[block] = content

    def find(self, content: bytes) -> int | None:
        return self._kept.get(content)

    def touch(self, content: bytes) -> None:
        """Let what is kept under this hash, if it is, be evicted last."""
        if content in self._kept:
            self._kept.move_to_end(content)

    def __contains__(self, content: bytes) -> bool:
        return content in self._kept

    def pin(self, block: int) -> None:
        """Protect a block that a planned step reads or writes, until that step is over."""
        self._pins[block] = self._pins.get(block, 0) + 1
        content = self._hash_of.get(block)
        if content is not None:
            self._kept.move_to_end(content)

    def unpin(self, block: int) -> None:
        if self._pins[block] == 1:
            del self._pins[block]
            if block in self._leaving:
                self._leaving.remove(block)
                self._free.append(block)
        else:
            self._pins[block] -= 1

    def forget(self, content: bytes) -> None:
        """Drop what is kept under this hash and free its block, once it is not pinned."""
        block = self._kept.pop(content, None)
        if block is not None:
            del self._hash_of[block]
            if block in self._pins:
                self._leaving.add(block)
            else:
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
