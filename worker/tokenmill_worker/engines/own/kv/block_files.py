"""Files of the cache on disk: one for each block, named by its key, below a folder for its model.

    FOLDER/tokenmill-kv/<model key>/<first two digits>/<key>.kv

A file is written under another name and renamed, so that several processes may share the folder. A
head names model and key, and a checksum covers head and content: a file that is damaged, cut or in
the wrong place is removed and counts as missing. Every call may wait for the disk; any thread may
call. Which block is read or written when is decided elsewhere.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import secrets
import stat
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

FOLDER: Final = "tokenmill-kv"
# magic with the version of this format, model key, length of the key, key, bytes of the block
_HEAD: Final = struct.Struct("<8s32sB39sQ")
_SUM: Final = struct.Struct("<I")  # CRC-32 of the head and the block
_HEAD_BYTES: Final = _HEAD.size + _SUM.size
_MAGIC: Final = b"tmkv\0\0\0\1"
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in a file's place never waits
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSEEN: Final = 1 / 16  # of the limit: what is written before the folder is counted again
_KEPT: Final = 0.9  # of the limit, after the oldest files were removed
_STALE_S: Final = 3600.0  # an unfinished file of this age has no writer any more

FAILURES: Final = ("busy", "damaged", "full", "io", "slow")  # the reasons that are counted


class BlockFiles:
    """The blocks of one model in a folder that holds at most `limit_bytes`, those of others
    included.

    `model_key` (32 bytes) differs for whatever changes a block's content beside its tokens.

    Raises OSError if the folder cannot be made or belongs to another user.
    """

    def __init__(self, folder: Path, model_key: bytes, block_bytes: int, limit_bytes: int) -> None:
        self._root = folder / FOLDER
        self.model_key = model_key
        self._home = self._root / model_key.hex()
        self._block_bytes = block_bytes
        self._limit = limit_bytes
        self._allowance = 0  # bytes that may be written before the folder is counted again
        self._name, self._names = secrets.token_hex(8), itertools.count()  # of unfinished files
        self._lock = threading.Lock()
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
        self.num_written = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(self._root)
        _make_private(self._home)

    def count_failure(self, reason: str) -> None:
        with self._lock:
            self.failures[reason] += 1

    def has(self, key: bytes) -> bool:
        """Return whether there is a file of this block; whether it is whole shows when it is
        read.
        """
        return _stat(self._path(key)) is not None

    # ── reading ──

    def read(self, key: bytes, into: Any) -> bool:
        """Read a block into a buffer of its size. Return False, with any content in the buffer, if
        there is no valid file.
        """
        path = self._path(key)
        try:
            file = os.open(path, os.O_RDONLY | _FLAGS)
        except FileNotFoundError:
            return False  # another process has removed it
        except OSError as error:
            self._note(error)
            return False
        try:
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and self._is_valid(file, found.st_size, key, into):
                os.utime(file)  # the least recently used files are removed first
                return True
        except OSError as error:
            self._note(error)
            return False
        finally:
            os.close(file)
        self.count_failure("damaged")
        self._remove(path)
        return False

    def _is_valid(self, file: int, size: int, key: bytes, into: Any) -> bool:
        if size != _HEAD_BYTES + self._block_bytes:
            return False
        head = bytearray(_HEAD_BYTES)
        if os.readv(file, [head, into]) != size:
            return False
        own = self._head(key)
        return head[: _HEAD.size] == own and head[_HEAD.size :] == _checksum(own, into)

    # ── writing ──

    def write(self, key: bytes, block: Any) -> bool:
        """Write a block, unless there is a file of it. Return False if that failed."""
        path = self._path(key)
        try:
            os.utime(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._note(error)
            return False
        else:
            return True
        size = _HEAD_BYTES + self._block_bytes
        if self._allowance < size:
            self._allowance = self._make_room()
        if self._allowance < size:
            self.count_failure("full")
            return False
        unfinished = self._home / f"{self._name}-{next(self._names)}.tmp"
        try:
            self._write(unfinished, key, block)
            unfinished.rename(path)
        except OSError as error:
            self._note(error)
            self._remove(unfinished)
            return False
        self._allowance -= size
        with self._lock:
            self.num_written += 1
        return True

    def _write(self, unfinished: Path, key: bytes, block: Any) -> None:
        for folder in (self._root, self._home, self._path(key).parent):
            _make_private(folder)  # another process may have removed it
        head = self._head(key)
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            parts = [head + _checksum(head, block), block]
            if os.writev(file, parts) != _HEAD_BYTES + self._block_bytes:
                raise OSError(errno.ENOSPC, "the file was cut")
        finally:
            os.close(file)

    def _make_room(self) -> int:
        """Remove the least recently used files, of every model, if they are too many; return the
        bytes that may be written until the next call.
        """
        files = sorted(self._all_files())
        total = sum(size for _, size, _ in files)
        size = _HEAD_BYTES + self._block_bytes
        if total + size > self._limit:
            for _, size, path in files:
                if total <= self._limit * _KEPT:
                    break
                self._remove(path)
                total -= size
        return min(self._limit - total, max(size, int(self._limit * _UNSEEN)))

    def _all_files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (time of its last use, bytes, path) of each file of this cache."""
        for path in _children(self._root, depth=3):
            if path.suffix == ".kv" and (found := _stat(path)) is not None:
                yield found.st_mtime, found.st_size, path
        for path in _children(self._root, depth=2):
            if path.suffix == ".tmp" and (found := _stat(path)) is not None:
                if time.time() - found.st_mtime > _STALE_S:
                    self._remove(path)
                else:
                    yield found.st_mtime, found.st_size, path

    # ── names and faults ──

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._home / name[:2] / f"{name}.kv"

    def _head(self, key: bytes) -> bytes:
        return _HEAD.pack(_MAGIC, self.model_key, len(key), key, self._block_bytes)

    def _note(self, error: OSError) -> None:
        """Count a failed call; describe the first one of its kind in the log."""
        reason = "full" if error.errno in _NO_SPACE else "io"
        if not self.failures[reason]:
            log.warning("The cache on disk: %s; counted, not logged again", error)
        self.count_failure(reason)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # a folder in a file's place
            log.debug("%s stays: %s", path, error)


def _checksum(head: bytes, block: Any) -> bytes:
    return _SUM.pack(zlib.crc32(block, zlib.crc32(head)))


def _make_private(folder: Path) -> None:
    """Make a folder that no other user may enter. Raises OSError if another user made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "is no folder of this user", str(folder))
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _children(folder: Path, depth: int) -> Iterator[Path]:
    """Yield what lies `depth` levels below a folder; what cannot be listed has no children."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if not entry.is_symlink()]
    except OSError:
        return
    for path in found:
        if depth == 1:
            yield path
        else:
            yield from _children(path, depth - 1)


def _stat(path: Path) -> os.stat_result | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None
