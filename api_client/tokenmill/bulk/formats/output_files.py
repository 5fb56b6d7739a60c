"""The output and the error file of a batch.

Both are only appended to, and are on disk before progress is reported. A later run reads the line
numbers of the answers back from their ids, and so resumes exactly. A last line that a crash left
incomplete is removed. The file `OUT.batch` beside the output names the batch and the input's
digest. The output is locked while a process writes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import msgspec

from tokenmill.bulk.batch import Batch, Totals
from tokenmill.bulk.formats.input_file import LineSet
from tokenmill.bulk.formats.output_line import EXPIRED, EncodedLine, line_number
from tokenmill.errors import ConfigurationError

_BLOCK: Final = 1024 * 1024
_decode_batch: Final = msgspec.json.Decoder(Batch).decode


class _UsedTokens(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None
    input_tokens: int = 0  # these of the Responses API
    output_tokens: int = 0
    input_tokens_details: dict[str, int] | None = None
    output_tokens_details: dict[str, int] | None = None


class _Body(msgspec.Struct):
    usage: _UsedTokens | None = None


class _Response(msgspec.Struct):
    body: _Body | None = None


class _Error(msgspec.Struct):
    code: str = ""


class _Written(msgspec.Struct):
    """The fields of an output line that are read back."""

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
        """Return the paths of an output: the errors of `out.jsonl` are in `out.errors.jsonl` by
        default.

        Raises ConfigurationError for paths that cannot be used.
        """
        if not output.name:
            raise ConfigurationError(f"{output} is a directory: name a file for the answers")
        paths = cls(
            output, errors or output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")
        )
        for path in (paths.output, paths.errors, paths.record, paths.draft):
            _check_place(path)
        if paths.errors.resolve() in (paths.output.resolve(), paths.record.resolve()):
            raise ConfigurationError(
                f"{paths.errors} has another use: name another file for the errors"
            )
        return paths

    @property
    def record(self) -> Path:
        return self.output.with_name(f"{self.output.name}.batch")

    @property
    def draft(self) -> Path:
        """Return the path of the next record while it is written."""
        return self.output.with_name(f"{self.output.name}.batch.new")

    def check_input(self, source: Path) -> None:
        """Raise ConfigurationError if one of the files is the input, which would be lost."""
        for path in (self.output, self.errors, self.record):
            with contextlib.suppress(OSError):  # one of the two is not there
                if path.samefile(source):
                    raise ConfigurationError(f"{path} is the batch's input: name another file")


@dataclass(slots=True)
class Done:
    """The lines that the files contain already, and their totals."""

    lines: LineSet = field(default_factory=LineSet)
    totals: Totals = field(default_factory=Totals)


class OutputFiles:
    """The two files, open for appending and locked. Raises ConfigurationError if another process
    has locked them.
    """

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
                raise ConfigurationError(
                    f"{self.paths.output} is being written by another process"
                ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk fails again; `write` has reported it
                file.close()
        self._files.clear()
        if self._lock is not None:
            if not self.paths.record.exists() and not self.paths.output.stat().st_size:
                self.paths.output.unlink()  # no batch was begun
            self._lock.close()

    def load_record(self) -> Batch | None:
        """Return the batch to which these files belong; None if there is no record."""
        if not self.paths.record.exists():
            return None
        try:
            with _explained(self.paths.record):
                return _decode_batch(self.paths.record.read_bytes())
        except msgspec.MsgspecError as error:
            raise ConfigurationError(f"{self.paths.record} is damaged: {error}") from error

    def save_record(self, batch: Batch) -> None:
        """Write the record; after a crash the file has either the old or the new one."""
        draft = self.paths.draft
        with _explained(draft):
            with draft.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(batch), indent=2) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.paths.record)

    def resume(self) -> Done:
        """Remove incomplete last lines, and return what the files contain. Raises
        ConfigurationError for files that have other contents.
        """
        done = Done()
        for is_error, path in ((False, self.paths.output), (True, self.paths.errors)):
            if path.exists():
                with _explained(path):
                    _cut_half_line(path)
                    _read_back(path, is_error, done)
        return done

    def discard(self) -> None:
        """Empty the output, and delete the errors and the record."""
        with _explained(self.paths.output):
            os.truncate(self.paths.output, 0)
            self.paths.errors.unlink(missing_ok=True)
            self.paths.record.unlink(missing_ok=True)

    def write(self, answers: Iterable[EncodedLine]) -> None:
        """Append answers. They are on disk when this returns."""
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
            self._files[is_error] = (self.paths.errors if is_error else self.paths.output).open(
                "ab"
            )
        return self._files[is_error]


def _check_place(path: Path) -> None:
    """Raise ConfigurationError if no file of this name can be written there."""
    with _explained(path), contextlib.suppress(FileNotFoundError):
        if not path.parent.is_dir():
            raise ConfigurationError(
                f"there is no folder {path.parent}: make it first, or name another for {path.name}"
            )
        try:
            mode = path.stat().st_mode
        except ValueError as error:  # it holds a NUL, or is no Unicode
            words = f"{str(path)!r} cannot be the name of a file: {error}"
            raise ConfigurationError(words) from error
        if stat.S_ISDIR(mode):
            raise ConfigurationError(f"{path} is a directory: name a file for the answers")


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
                raise ConfigurationError(
                    f"{path} holds a line that is none of a batch's: {error}"
                ) from error
            if number not in done.lines:
                done.lines.add(number)
                done.totals = done.totals.plus(_share(written, is_error))


def _share(written: _Written, is_error: bool) -> Totals:
    body = written.response.body if written.response else None
    used = body.usage if body and body.usage else _UsedTokens()
    inputs = used.prompt_tokens_details or used.input_tokens_details or {}
    outputs = used.completion_tokens_details or used.output_tokens_details or {}
    return Totals(
        completed=int(not is_error),
        failed=int(is_error),
        expired=int(written.error is not None and written.error.code == EXPIRED.code),
        input_tokens=used.prompt_tokens + used.input_tokens,
        cached_tokens=inputs.get("cached_tokens", 0),
        output_tokens=used.completion_tokens + used.output_tokens,
        reasoning_tokens=outputs.get("reasoning_tokens", 0),
    )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{error.filename or path}: {error.strerror or error}") from error
