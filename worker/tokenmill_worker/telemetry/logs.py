"""Formats log lines for people (`text`) or machines (`json`). Values are fields and not part of the
sentence.

    log.info("job finished", extra={"job_id": job_id, "tokens": 64, "private": {"text": text}})

Fields under `private` (prompts and answers) are left out unless the settings allow them: users'
text does not belong in a log that operators, collectors and backups read.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TextIO

import msgspec

from tokenmill_schemas.visible import visible, visible_json

_STANDARD: Final = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "taskName",
}
_NOISY: Final = ("urllib3", "asyncio", "alembic", "transformers", "filelock", "httpx", "httpcore")
_encode: Final = msgspec.json.Encoder(enc_hook=str).encode
_NEEDS_QUOTES: Final = re.compile(r'[\s"=\\]|^$')


class _Formatter(logging.Formatter):
    def __init__(self, *, with_private: bool, context: Mapping[str, str]) -> None:
        super().__init__()
        self._with_private = with_private
        self._context = dict(context)

    def fields(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        yield from self._context.items()
        for name, value in record.__dict__.items():
            if name == "private" and isinstance(value, Mapping):
                if self._with_private:
                    yield from value.items()
            elif name not in _STANDARD:
                yield name, value


class TextFormatter(_Formatter):
    """Writes `12:00:01.234 INFO queue.leases: released jobs=4` on one line, but for a traceback.

    Control characters become escapes. A value with a space, a quote, `=` or a backslash is quoted,
    so that it cannot look like another field.
    """

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        where = record.name.removeprefix("tokenmill_worker.")
        words = " ".join(
            [
                visible(record.getMessage(), keep=""),
                *(f"{name}={_value(v)}" for name, v in self.fields(record)),
            ]
        )
        line = f"{clock}.{record.msecs:03.0f} {record.levelname:<7} {where}: {words}"
        if record.exc_info is None:
            return line
        return f"{line}\n{visible(self.formatException(record.exc_info))}"


class JsonFormatter(_Formatter):
    """Writes one JSON object per line: time (UTC), level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{stamp}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **dict(self.fields(record)),
        }
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        try:
            line = _encode(entry).decode()
        except UnicodeEncodeError:  # a lone surrogate
            line = json.dumps(entry, default=str)
        return visible_json(line)


def configure_logging(
    level: str = "info",
    form: Literal["text", "json"] = "text",
    *,
    with_private: bool = False,
    context: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
) -> logging.Handler:
    """Take over the root logger; returns the handler. `context` fields are on every line."""
    formatter = (JsonFormatter if form == "json" else TextFormatter)(
        with_private=with_private, context=context or {}
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for other in list(root.handlers):
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    return handler


def _value(value: object) -> str:
    words = f"{value:.6g}" if isinstance(value, float) else str(value)
    if _NEEDS_QUOTES.search(words):
        words = words.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{visible(words, keep="")}"'
    return visible(words, keep="")
