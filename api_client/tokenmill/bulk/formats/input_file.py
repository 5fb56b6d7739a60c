"""Reads and checks an input file line by line, in memory that does not grow with the file.

There are two passes. `summarise` checks the envelopes of all lines, counts them, and finds names
that occur twice; SQLite keeps the names in a temporary file. `to_request` then makes jobs of the
good lines. A line is identified by its number; the first is 1. Blank lines are skipped.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from tokenmill.errors import ConfigurationError, InvalidRequest
from tokenmill.openai.errors import of_exception
from tokenmill.openai.request_body import fields_of
from tokenmill.operations.submit import build_request
from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES
from tokenmill_schemas.job import JobRequest, Priority
from tokenmill_schemas.openai import URLS
from tokenmill_schemas.openai_batch import LineEnvelope

MAX_LINE_BYTES: Final = MAX_PAYLOAD_BYTES
MAX_CUSTOM_ID_CHARS: Final = 512
DIGEST_BYTES: Final = 16
MAX_LISTED: Final = 50  # bad lines listed in the batch object
_KIND_BYTES: Final = 8  # of a file's begin, which show what it is
_PACKED: Final = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}  # fmt: skip
_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")  # the marks of both orders; UTF-32 has them too
_decode: Final = msgspec.json.Decoder(LineEnvelope).decode


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that has no job. `status` is the HTTP status that the API would have returned; 0 if
    the line is no request at all.
    """

    line: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None
    status: int = 0


@dataclass(frozen=True, slots=True)
class GoodLine:
    line: int
    custom_id: str
    url: str
    body: dict[str, Any]
    num_bytes: int = 0  # as it is in the file


Line = GoodLine | BadLine


class LineSet:
    """A set of line numbers, with one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = 0

    def add(self, line: int) -> None:
        place, bit = divmod(line, 8)
        if place >= len(self._bits):
            self._bits.extend(bytes(max(1024, place + 1 - len(self._bits))))
        self.count += not self._bits[place] >> bit & 1
        self._bits[place] |= 1 << bit

    def __contains__(self, line: int) -> bool:
        place, bit = divmod(line, 8)
        return place < len(self._bits) and bool(self._bits[place] >> bit & 1)


@dataclass(slots=True)
class FileSummary:
    """Summary of a file. `endpoint` and `model` are those of the first good line. `repeated` has
    the lines whose name an earlier line used.
    """

    total: int = 0
    last_line: int = 0
    digest: str = ""
    endpoint: str = ""
    model: str = ""
    first_bad: list[BadLine] = field(default_factory=list)
    repeated: LineSet = field(default_factory=LineSet)


def read(path: Path, see: Callable[[bytes], object] = lambda _: None) -> Iterator[Line]:
    """Yield every line that is not blank. `see` is called with all bytes. Raises ConfigurationError
    if the path is no readable file.
    """
    with _opened(path) as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            see(raw)
            if len(raw) > MAX_LINE_BYTES:
                _skip_rest(file, raw, see)
                yield BadLine(
                    number, None, "line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes"
                )
            elif not raw.isspace():
                yield parse(number, raw)


def check_readable(path: Path) -> None:
    """Raise ConfigurationError if the file cannot be read, before anything is created for it."""
    with _opened(path):
        pass


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        if path.exists() and not path.is_file():
            raise ConfigurationError(
                f"cannot read {path}: it must be a file that can be read twice, no pipe or folder"
            )
        with path.open("rb") as file:
            _check_kind(path, file.peek(_KIND_BYTES))
            yield file
    except ConfigurationError:
        raise
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # of a name that holds a NUL, or is no Unicode
        raise ConfigurationError(f"cannot read {str(path)!r}: {error}") from error


def _check_kind(path: Path, begin: bytes) -> None:
    """Raise ConfigurationError for a file that is no text in UTF-8 as a whole. Else each of its
    lines would be told as bad.
    """
    for mark, kind in _PACKED.items():
        if begin.startswith(mark):
            raise ConfigurationError(f"cannot read {path}: it is packed ({kind}); unpack it first")
    if begin.startswith(_UTF_16) or begin[:1] == b"\0" or begin[1:2] == b"\0":
        raise ConfigurationError(
            f"cannot read {path}: it is text in UTF-16 or UTF-32, or no text; write it in UTF-8"
        )


def _skip_rest(file: IO[bytes], part: bytes, see: Callable[[bytes], object]) -> None:
    while part and not part.endswith(b"\n"):
        part = file.readline(MAX_LINE_BYTES)
        see(part)


def parse(number: int, raw: bytes) -> Line:
    try:
        envelope = _decode(raw.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return BadLine(
            number, None, "invalid_json_line", f"This line is not a JSON object: {words}"
        )
    return _checked(number, envelope, len(raw))


def _checked(number: int, envelope: LineEnvelope, num_bytes: int) -> Line:
    name = envelope.custom_id
    if name is None or name == "":
        return BadLine(
            number,
            None,
            "missing_required_parameter",
            "Missing required parameter: 'custom_id'.",
            "custom_id",
        )
    if not isinstance(name, str) or len(name) > MAX_CUSTOM_ID_CHARS or "\0" in name:
        words = f"custom_id must be a text of at most {MAX_CUSTOM_ID_CHARS} characters"
        return BadLine(
            number,
            name[:64] if isinstance(name, str) else None,
            "invalid_custom_id",
            words,
            "custom_id",
        )
    if envelope.method != "POST":
        if envelope.method is None:
            return _missing(number, name, "method")
        words = f"method must be POST, not {str(envelope.method)[:64]}"
        return BadLine(number, name, "invalid_method", words, "method")
    if envelope.url not in URLS:
        if envelope.url is None:
            return _missing(number, name, "url")
        words = f"url must be one of {', '.join(URLS)}, not {str(envelope.url)[:64]}"
        return BadLine(number, name, "invalid_url", words, "url")
    if not isinstance(envelope.body, dict):
        return _missing(number, name, "body")
    return GoodLine(number, name, envelope.url, envelope.body, num_bytes)


def _missing(number: int, name: str | None, param: str) -> BadLine:
    return BadLine(
        number, name, "missing_required_parameter", f"Missing required parameter: '{param}'.", param
    )


def read_again(path: Path, digest: str) -> Iterator[Line]:
    """Yield the lines again after `summarise`. Raises ConfigurationError at the end if the digest
    differs from the given one.
    """
    seen = hashlib.blake2b(digest_size=DIGEST_BYTES)
    yield from read(path, seen.update)
    if seen.hexdigest() != digest:
        raise ConfigurationError(
            f"{path} has changed since the batch was begun: bring the old content back, and go on"
        )


def summarise(
    path: Path,
    each: Callable[[int], object] = lambda _: None,
    *,
    only: tuple[str, str] | None = None,
) -> FileSummary:
    """Read the file for the first time and return its summary. `each` is called every 1000 lines
    with their number. `only`: the endpoint and the model that every line must name.
    """
    found, digest = FileSummary(), hashlib.blake2b(digest_size=DIGEST_BYTES)
    with _Names() as names:
        for line in read(path, digest.update):
            found.total += 1
            found.last_line = line.line
            if isinstance(line, GoodLine):
                line = _noted(line, found, names, only)
            if isinstance(line, BadLine) and len(found.first_bad) < MAX_LISTED:
                found.first_bad.append(line)
            if found.total % 1000 == 0:
                each(found.total)
    found.digest = digest.hexdigest()
    return found


def _noted(line: GoodLine, found: FileSummary, names: _Names, only: tuple[str, str] | None) -> Line:
    if not names.add(line.custom_id):
        found.repeated.add(line.line)
        return repeated(line)
    if not found.endpoint:
        found.endpoint = line.url
    model = line.body.get("model")
    if only is not None and line.url != only[0]:
        words = f"url must be that of the batch, {only[0]}, not {line.url}"
        return BadLine(line.line, line.custom_id, "mismatched_url", words, "url")
    if only is not None and model != only[1]:
        words = f"model must be that of the first line, {only[1]}, not {str(model)[:64]}"
        return BadLine(line.line, line.custom_id, "mismatched_model", words, "model")
    if not found.model and isinstance(model, str):
        found.model = model
    return line


def repeated(line: GoodLine) -> BadLine:
    words = f"custom_id {line.custom_id[:64]!r} was used by an earlier line"
    return BadLine(line.line, line.custom_id, "duplicate_custom_id", words, "custom_id")


class _Names:
    """A set of names on disk: a temporary database of SQLite with a small cache in memory."""

    def __enter__(self) -> _Names:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA cache_size = -4000")
        self._database.execute("CREATE TABLE names (name TEXT PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")
        return self

    def add(self, name: str) -> bool:
        """Add a name. Return False if it was there."""
        word = name.encode("utf-8", "surrogatepass")
        return (
            self._database.execute("INSERT OR IGNORE INTO names VALUES (?)", (word,)).rowcount == 1
        )

    def __exit__(self, *_: object) -> None:
        self._database.close()


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """The values that all jobs of a batch share. `any_model`: ignore the models that the lines
    name.
    """

    batch_id: str
    tenant: str = ""
    deadline_ms: int | None = None
    any_model: bool = False
    priority: Priority = Priority.BULK


def job_id(batch_id: str, line: int) -> str:
    """Return the id of a line's job. It is always the same, so that submitting a line again adds no
    second job.
    """
    return f"{batch_id}-{line}"


def line_of(batch_id: str, job: str) -> int:
    return int(job.removeprefix(f"{batch_id}-"))


def to_request(line: GoodLine, order: BatchDefaults) -> JobRequest | BadLine:
    """Return the job of a line, or the error that the API would have returned."""
    try:
        fields = fields_of(line.url, line.body)
        if order.any_model:
            fields.pop("model")
        request = build_request(
            fields
            | {
                "job_id": job_id(order.batch_id, line.line),
                "batch_id": order.batch_id,
                "priority": order.priority,
                "tenant": order.tenant,
                "stream": False,
                "metadata": {"custom_id": line.custom_id, "endpoint": line.url},
            }
        )
    except InvalidRequest as refused:
        error = of_exception(refused)
        return BadLine(
            line.line, line.custom_id, error.code, error.message, error.param, error.status
        )
    return msgspec.structs.replace(request, deadline_ms=order.deadline_ms)
