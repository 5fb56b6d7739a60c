"""Keeps the bytes of files in a folder or a bucket: `/srv/files`, `s3://BUCKET/PREFIX`.

An object appears whole or not at all. Memory is bounded by the size of a part, not of an object.
Needs the library obstore, which reads the credentials of a bucket from the environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tokenmill.errors import ConfigurationError, QueueUnavailable

if TYPE_CHECKING:
    from obstore import AsyncWritableFile

PART_BYTES: Final = 5 * 1024 * 1024  # the least that S3 takes
_PARTS: Final = 2  # that are written at once
_OPTIONS: Final[dict[str, Any]] = {
    "client_options": {
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=30),
        "allow_http": True,  # where AWS_ENDPOINT names such a server
    },
    "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
}


class FilesUnavailable(QueueUnavailable):
    """The store cannot be reached, or takes no more."""


class ObjectStore:
    """The objects below one URL. Raises ConfigurationError for a URL that cannot be used."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            words = "a store of files needs obstore: pip install '.[gateway]'"
            raise ConfigurationError(words) from error
        self._library = obstore
        self._folder: Path | None = None
        scheme, mark, rest = url.partition("://")
        try:
            if not mark or scheme == "file":
                self._folder = Path(rest if mark else url).absolute()
                self._objects: Any = LocalStore(self._folder, mkdir=True)
            else:
                self._objects = from_url(url, **_OPTIONS)
        except (OSError, ValueError, obstore.exceptions.BaseError) as error:
            words = (
                f"files cannot be kept in {url!r}: {_first(error)}; name a folder or s3://BUCKET"
            )
            raise ConfigurationError(words) from error

    @contextlib.asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator[AsyncWritableFile]:
        """Open a new object. It exists if the block ends without an exception."""
        with self._explained():
            async with self._library.open_writer_async(
                self._objects, name, buffer_size=PART_BYTES, max_concurrency=_PARTS
            ) as writer:
                yield writer

    async def read(self, name: str, begin: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes from `begin` to before `end`, a part by a call, so that a slow reader
        holds no connection. Raises FileNotFoundError.
        """
        for at in range(begin, end, PART_BYTES):
            with self._explained():
                part = await self._library.get_range_async(
                    self._objects, name, start=at, end=min(at + PART_BYTES, end)
                )
            yield bytes(part)

    def fetch(self, name: str, size: int, folder: Path) -> Path:
        """Return the path of an object's bytes: a copy in `folder`, if the store is no folder.
        Raises FileNotFoundError.
        """
        if self._folder is not None:
            path = self._folder / name
            path.stat()
            return path
        path = folder / name
        with path.open("wb") as file:
            for at in range(0, size, PART_BYTES):
                end = min(at + PART_BYTES, size)
                with self._explained():
                    part = self._library.get_range(self._objects, name, start=at, end=end)
                file.write(part)
        return path

    def put(self, name: str, source: Path) -> None:
        """Store a file's content."""
        with self._explained():
            self._library.put(
                self._objects, name, source, chunk_size=PART_BYTES, max_concurrency=_PARTS
            )

    def remove(self, name: str) -> None:
        """Remove an object, and what a killed process wrote of it, if it is there."""
        with self._explained(), contextlib.suppress(FileNotFoundError):
            self._library.delete(self._objects, name)
        if self._folder is not None:
            for part in self._folder.glob(f"{name}#*"):
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, self._library.exceptions.BaseError) as error:
            words = f"the store of files cannot be used: {_first(error)}"
            raise FilesUnavailable(words) from error


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0]
