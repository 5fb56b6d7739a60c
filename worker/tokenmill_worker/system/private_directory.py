"""Directories of temporary files, which do not stay behind when their process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


def private_directory(label: str) -> Path:
    """Create a directory for this process. Remove those of the label whose process was killed: a
    living process holds a lock on its own.
    """
    prefix = f"tokenmill_{label}_"
    for other in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, or a living process's
            lock = _locked(other)
            shutil.rmtree(other, ignore_errors=True)
            os.close(lock)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    _locked(made)  # until the process ends, and before it has a name that others look for
    return made.rename(made.with_name(made.name.removeprefix(".")))


def _locked(directory: Path) -> int:
    """Return the descriptor that holds a directory's lock. Raises OSError if another one does."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
