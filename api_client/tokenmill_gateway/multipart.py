"""Reads a body of multipart/form-data piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request

from tokenmill_gateway.refusals import HttpRefusal

_MOST_HEADER_BYTES: Final = 8_192


@dataclass(slots=True)
class FormPart:
    """The begin of a part of a form. `file_name` is None for a plain value."""

    name: str
    file_name: str | None


@dataclass(slots=True)
class _Header:
    name: bytes = b""
    value: bytes = b""


@dataclass(slots=True)
class Form:
    """The pieces of a form, in order: a FormPart, then the bytes of it. Raises HttpRefusal."""

    boundary: bytes
    is_complete: bool = False
    _pieces: list[FormPart | bytes] = field(default_factory=list)
    _header: _Header = field(default_factory=_Header)
    _disposition: bytes = b""
    _parser: Any = None

    @classmethod
    def of(cls, request: Request) -> Form:
        given = request.headers.get("content-type", "")
        kind, options = _library().parse_options_header(given)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            words = "the body must be of type multipart/form-data, with a boundary"
            raise HttpRefusal.of(415, "unsupported_media_type", words)
        form = cls(options[b"boundary"])
        callbacks = {
            name: getattr(form, f"_{name}")
            for name in (
                "on_part_begin", "on_header_field", "on_header_value", "on_header_end",
                "on_headers_finished", "on_part_data", "on_end",
            )
        }  # fmt: skip
        try:
            form._parser = _library().MultipartParser(form.boundary, callbacks)
        except _library().MultipartParseError as error:
            raise _wrong(error) from None
        return form

    def feed(self, data: bytes) -> list[FormPart | bytes]:
        """Return the pieces that these bytes complete."""
        try:
            self._parser.write(data)
        except _library().MultipartParseError as error:
            raise _wrong(error) from None
        pieces, self._pieces = self._pieces, []
        return pieces

    def _on_part_begin(self) -> None:
        self._disposition = b""
        self._header = _Header()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header.name += data[start:end]
        self._check_header()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header.value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header.name) + len(self._header.value) > _MOST_HEADER_BYTES:
            raise _wrong(f"a header of a part has more than {_MOST_HEADER_BYTES} bytes")

    def _on_header_end(self) -> None:
        if self._header.name.lower() == b"content-disposition":
            self._disposition = self._header.value
        self._header = _Header()

    def _on_headers_finished(self) -> None:
        _, options = _library().parse_options_header(self._disposition)
        if b"name" not in options:
            raise _wrong("a part has no name")
        file_name = options.get(b"filename")
        self._pieces.append(FormPart(_text(options[b"name"]), _text(file_name)))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(data[start:end])

    def _on_end(self) -> None:
        self.is_complete = True


def _library() -> Any:
    """Return python-multipart, imported with the first upload."""
    from python_multipart import multipart

    return multipart


def _text(data: bytes | None) -> Any:
    return None if data is None else data.decode("utf-8", "replace")


def _wrong(reason: object) -> HttpRefusal:
    return HttpRefusal.of(400, "invalid_form", f"the body is no multipart form: {reason}")
