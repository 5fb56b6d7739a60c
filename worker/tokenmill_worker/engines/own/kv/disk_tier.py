"""The third tier of the prefix cache: threads that read and write the files of blocks.

The engine's thread hands over blocks of the host pool and goes on; results reach it when it calls
`poll`. So no step waits for the disk. A block that was handed over belongs to a thread here until
its result has been taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from tokenmill_worker.engines.own.kv.block_files import BlockFiles

log = logging.getLogger(__name__)
T = TypeVar("T")
Job = tuple[Callable[[], Any], Callable[[Any], None]]

READERS: Final = 4  # a disk answers several reads at once, and checksums need a core each
# A search that ends within this time delays no step; most do, for they open one file.
_SEARCH_WAIT_S: Final = 0.001


class DiskTier:
    """Reads and writes blocks of the host pool on threads of its own.

    Args:
        files: the folder.
        blocks: the host pool's memory, `blocks[i]` being the buffer of block i.
        settle: waits until the device's copies to the host pool are done; called on the engine's
            thread before blocks are handed over.
    """

    def __init__(
        self,
        files: BlockFiles,
        blocks: Any,
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = files
        self.clock = clock
        self.model_key = files.model_key.hex()
        self.num_read = self.num_missed = 0  # blocks of prompts that were there, or were not
        self.num_unwritten = 0  # blocks that were handed over to be written
        self.is_current = True  # false: the weights are not those of the files any more
        self.ask_again_at = 0.0  # on `clock`: until then it is too slow to be asked
        self._blocks = blocks
        self._settle = settle
        self._reads: SimpleQueue[Job | None] = SimpleQueue()
        self._writes: SimpleQueue[Job | None] = SimpleQueue()
        self._results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_fresh = 0  # searches that no `poll` has waited for
        # Daemons: a disk that hangs must not keep the process.
        self._threads = [
            threading.Thread(target=self._run, args=(jobs,), name=name, daemon=True)
            for name, jobs in (
                ("kv-writer", self._writes),
                *((f"kv-reader-{index}", self._reads) for index in range(READERS)),
            )
        ]
        for thread in self._threads:
            thread.start()

    # ── the engine's thread ──

    def search(self, find: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run `find`, which asks for files, on a thread; its result goes to `then`."""
        self._num_fresh += 1

        def take(found: T) -> None:
            self._num_fresh = 0
            then(found)

        self._reads.put((find, take))

    def read(self, keys: Iterable[tuple[bytes, int]], then: Callable[[bytes, bool], None]) -> None:
        """Read blocks, each of a key into a block of the host pool; tell `then` of each key."""
        self._settle()
        for key, block in keys:
            self._reads.put(
                (partial(self.files.read, key, self._blocks[block]), partial(then, key))
            )

    def write(
        self, blocks: Iterable[tuple[bytes, int]], then: Callable[[bytes, int], None]
    ) -> None:
        """Write blocks of the host pool; tell `then` of each that is done, written or not."""
        self._settle()
        for key, block in blocks:
            self.num_unwritten += 1
            self._writes.put(
                (
                    partial(self.files.write, key, self._blocks[block]),
                    partial(self._written, partial(then, key, block)),
                )
            )

    def _written(self, then: Callable[[], None], _is_written: bool) -> None:
        self.num_unwritten -= 1
        then()

    def poll(self) -> None:
        """Take the results that are there. A search that has just begun is waited for briefly."""
        give_up_at = self.clock() + _SEARCH_WAIT_S if self._num_fresh else 0.0
        while True:
            try:
                left = give_up_at - self.clock() if self._num_fresh else 0.0
                take = self._results.get(left > 0, left if left > 0 else None)
            except Empty:
                self._num_fresh = 0
                return
            take()

    def stats(self) -> dict[str, Any]:
        """Return its counters, with the names that they have in EngineStats."""
        return {
            "disk_blocks_read": self.num_read,
            "disk_blocks_missed": self.num_missed,
            "disk_blocks_written": self.files.num_written,
            "disk_failures": dict(self.files.failures),
        }

    def close(self) -> None:
        """Let the threads end, after the reads and writes that they have."""
        for thread in self._threads:
            jobs = self._writes if thread is self._threads[0] else self._reads
            jobs.put(None)

    # ── the other threads ──

    def _run(self, jobs: SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            work, then = job
            try:
                self._results.put(partial(then, work()))
            except Exception:  # not foreseen; the block must come back
                log.exception("A call of the cache on disk failed")
                self.files.count_failure("io")
                self._results.put(partial(then, None))
