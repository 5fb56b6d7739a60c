"""The folder of one vLLM's temporary files: sockets between its processes, notes of its core."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PREFIX: Final = "tokenmill-vllm-"


@contextlib.contextmanager
def own_folder() -> Iterator[str]:
    """Make a folder that ends with the block. Remove those of processes that were killed, which
    could not: a living process holds a lock on its own.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(folder):  # another user's, or a living one's
            shutil.rmtree(folder, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    with _locked(made):  # before it has a name that others look for
        folder = made.rename(made.with_name(made.name.removeprefix(".")))
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. Raises OSError if another process does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
