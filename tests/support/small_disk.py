"""A disk of a few megabytes that a test fills: a tmpfs, mounted on a folder of the test's own.

Only root with the right to mount has it. `need_small_disk` says what a machine without it means.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.lifecycle import missing


class SmallDisk:
    """A mounted folder; `fill` takes all of its space, `free` gives it back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Take the space down to the last page; servers may write meanwhile."""
        with self._filler.open("ab", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(b"\0" * size)

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def mounted(folder: Path, size_mb: int) -> Iterator[SmallDisk]:
    """Mount a disk on an empty folder. Raises PermissionError where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_mb}m,mode=755"
    command = ["mount", "-t", "tmpfs", "-o", options, "tokenmill-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"no disk can be mounted: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        # lazily: a server that is still ending may have files open
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def need_small_disk(folder: Path, size_mb: int) -> contextlib.AbstractContextManager[SmallDisk]:
    """Return a mounted disk as a context. Without the right to mount, the test is skipped; it fails
    where CI=true.
    """
    try:
        with mounted(folder, 1):
            pass
    except PermissionError as error:
        missing(str(error))
    return mounted(folder, size_mb)
