"""The output and the error file of a batch: only appended to, on disk before anything else is told, resumed exactly.

What is in them is what is done: whoever continues reads the line numbers back from their ids. A last line that a
crash cut off is cut away. Beside the output stands `OUT.batch`, which names the batch and the input's digest. The
output is locked while somebody writes. It knows no queue.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import msgspec

from api_client.bulk.answers import EXPIRED, Answer, line_number
from api_client.bulk.batch import Batch, Totals
from api_client.bulk.lines import Marks
from api_client.errors import ConfigurationError

_BLOCK: Final = 1024 * 1024
_decode_batch: Final = msgspec.json.Decoder(Batch).decode


class _UsedTokens(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, int] | None = None


class _Body(msgspec.Struct):
    usage: _UsedTokens | None = None


class _Response(msgspec.Struct):
    body: _Body | None = None


class _Error(msgspec.Struct):
    code: str = ""


class _Written(msgspec.Struct):
    """What is read back of a line."""

    id: str
    response: _Response | None = None
    error: _Error | None = None


_decode_line: Final = msgspec.json.Decoder(_Written).decode


@dataclass(frozen=True, slots=True)
class Paths:
    output: Path
    errors: Path

    @classmethod
    def of(cls, output: Path, errors: Path | None = None) -> Paths:
        """`out.jsonl` has its errors in `out.errors.jsonl`. Raises ConfigurationError for names that are none."""
        if output.is_dir() or not output.name:
            raise ConfigurationError(f"{output} is a directory: name a file for the answers")
        paths = cls(output, errors or output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}"))
        for path in (paths.output, paths.errors):
            if not path.parent.is_dir():
                raise ConfigurationError(
                    f"there is no folder {path.parent}: make it first, or name another for {path.name}"
                )
        if paths.errors.resolve() in (paths.output.resolve(), paths.record.resolve()):
            raise ConfigurationError(f"{paths.errors} has another use: name another file for the errors")
        return paths

    @property
    def record(self) -> Path:
        return self.output.with_name(f"{self.output.name}.batch")


@dataclass(slots=True)
class Done:
    """What the files hold already."""

    marks: Marks = field(default_factory=Marks)
    totals: Totals = field(default_factory=Totals)


class OutputFiles:
    """Open for appending, and locked. Raises ConfigurationError when another process has them."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self._files: dict[bool, IO[bytes]] = {}
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Self:
        with _explained(self.paths.output):
            self._lock = self.paths.output.open("ab")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise ConfigurationError(f"{self.paths.output} is being written by another process") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # of a full disk, which refuses again what `write` reported
                file.close()
        self._files.clear()
        if self._lock is not None:
            if not self.paths.record.exists() and not self.paths.output.stat().st_size:
                self.paths.output.unlink()  # nothing was begun
            self._lock.close()

    def load_record(self) -> Batch | None:
        """The batch that these files belong to."""
        if not self.paths.record.exists():
            return None
        try:
            with _explained(self.paths.record):
                return _decode_batch(self.paths.record.read_bytes())
        except msgspec.MsgspecError as error:
            raise ConfigurationError(f"{self.paths.record} is damaged: {error}") from error

    def save_record(self, batch: Batch) -> None:
        """The whole or nothing of it."""
        draft = self.paths.record.with_name(f"{self.paths.record.name}.new")
        with _explained(draft):
            with draft.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(batch), indent=2) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.paths.record)

    def resume(self) -> Done:
        """Cut off half lines, and read back what is done. Raises ConfigurationError for files of another making."""
        done = Done()
        for is_error, path in ((False, self.paths.output), (True, self.paths.errors)):
            if path.exists():
                with _explained(path):
                    _cut_half_line(path)
                    _read_back(path, is_error, done)
        return done

    def discard(self) -> None:
        """Begin anew."""
        with _explained(self.paths.output):
            os.truncate(self.paths.output, 0)
            self.paths.errors.unlink(missing_ok=True)
            self.paths.record.unlink(missing_ok=True)

    def write(self, answers: Iterable[Answer]) -> None:
        """On disk when this returns."""
        touched: set[bool] = set()
        path = self.paths.output
        with _explained(path):
            for answer in answers:
                self._file(answer.is_error).write(answer.data + b"\n")
                touched.add(answer.is_error)
            for is_error in touched:
                file = self._files[is_error]
                file.flush()
                os.fsync(file.fileno())

    def _file(self, is_error: bool) -> IO[bytes]:
        if is_error not in self._files:
            self._files[is_error] = (self.paths.errors if is_error else self.paths.output).open("ab")
        return self._files[is_error]


def _cut_half_line(path: Path) -> None:
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                end = start + place + 1
                break
            end = start
        file.truncate(end)


def _read_back(path: Path, is_error: bool, done: Done) -> None:
    with path.open("rb") as file:
        for raw in file:
            try:
                written = _decode_line(raw)
                number = line_number(written.id)
            except (msgspec.MsgspecError, ValueError) as error:
                raise ConfigurationError(f"{path} holds a line that is none of a batch's: {error}") from error
            if number not in done.marks:
                done.marks.add(number)
                done.totals = done.totals.plus(_share(written, is_error))


def _share(written: _Written, is_error: bool) -> Totals:
    body = written.response.body if written.response else None
    used = body.usage if body and body.usage else _UsedTokens()
    return Totals(
        completed=int(not is_error),
        failed=int(is_error),
        expired=int(written.error is not None and written.error.code == EXPIRED.code),
        input_tokens=used.prompt_tokens,
        cached_tokens=(used.prompt_tokens_details or {}).get("cached_tokens", 0),
        output_tokens=used.completion_tokens,
    )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{error.filename or path}: {error.strerror or error}") from error
