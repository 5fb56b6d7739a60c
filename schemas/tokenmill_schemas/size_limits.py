"""Rejects requests that would decode into far too many objects: a megabyte of MessagePack can
expand to gigabytes.

A large request is split into its fields without decoding them, since skipping needs no memory. A
list or map with more entries than any request may have is rejected by the count in its header; the
message is the one that validation gives for a smaller request. Text keys of `logit_bias` are
converted to integers here as well, again without decoding the rest.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

MAX_STOP_STRINGS: Final = 16
MAX_STOP_TOKEN_IDS: Final = 1_024
MAX_LOGIT_BIASES: Final = 1_024
MAX_PROMPT_IDS: Final = 2_000_000  # longer than any model
MAX_MESSAGES: Final = 10_000
MAX_METADATA: Final = 64
MAX_DOCUMENTS: Final = 10_000
MAX_TOOLS: Final = 128
MAX_FORMAT_CHARS: Final = 256 * 1024

HARMLESS_BYTES: Final = 256 * 1024  # smaller requests decode to at most 64 times their size

RawFields = dict[str, msgspec.Raw]
WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,10}")
_read_biases: Final = msgspec.msgpack.Decoder(dict[int | str, float]).decode
_split: Final = msgspec.msgpack.Decoder(RawFields).decode
_join: Final = msgspec.msgpack.Encoder().encode
# the first byte of a long array or map → how many bytes its count has
_COUNT_BYTES: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def reject_oversized(request: bytes) -> bytes:
    """Return the same request with each field once, after checking the sizes of its lists and maps.

    Raises ValueError with one sentence for a size above its limit, and msgspec's errors for bytes
    that are no request.
    """
    fields = _split(request)
    _limit(fields, "prompt_ids", MAX_PROMPT_IDS, "ids")
    _limit(fields, "messages", MAX_MESSAGES, "entries")
    _limit(fields, "metadata", MAX_METADATA, "entries")
    _limit(fields, "documents", MAX_DOCUMENTS, "entries")
    _limit(fields, "tools", MAX_TOOLS, "entries")
    for name in ("chat_template_kwargs", "tools", "continuations"):
        _limit_size(fields, name, name)
    if _is_map(fields.get("params")):
        fields["params"] = msgspec.Raw(_params(bytes(fields["params"])))
    return _join(fields)


def with_whole_keys(request: bytes) -> bytes | None:
    """Return the same request with the text keys of its `logit_bias` converted to integers.

    The keys of a map sent from JavaScript are texts. Returns None if the request has no
    `logit_bias` or a key is no integer.
    """
    try:
        fields = _split(request)
        params = _split(bytes(fields["params"]))
        biases = _read_biases(bytes(params["logit_bias"]))
    except (ValueError, RecursionError, KeyError):  # msgspec's errors are ValueErrors
        return None
    if not all(isinstance(key, int) or WHOLE_NUMBER.fullmatch(key) for key in biases):
        return None
    whole = {int(key): bias for key, bias in biases.items()}
    params["logit_bias"] = msgspec.Raw(_join(whole))
    fields["params"] = msgspec.Raw(_join(params))
    return _join(fields)


def _params(packed: bytes) -> bytes:
    fields = _split(packed)
    _limit(fields, "stop", MAX_STOP_STRINGS, "strings")
    _limit(fields, "stop_token_ids", MAX_STOP_TOKEN_IDS, "ids")
    _limit(fields, "logit_bias", MAX_LOGIT_BIASES, "entries")
    for name in ("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"):
        _limit_size(fields, name, name)
    if _is_map(fields.get("response_format")):
        fields["response_format"] = msgspec.Raw(_response_format(bytes(fields["response_format"])))
    return _join(fields)


def _response_format(packed: bytes) -> bytes:
    fields = _split(packed)
    for name in ("json_schema", "structural_tag"):
        _limit_size(fields, name, f"response_format.{name}")
    return _join(fields)


def _limit(fields: RawFields, name: str, limit: int, noun: str) -> None:
    found = _count(bytes(fields.get(name, b"")))
    if found > limit:
        raise ValueError(f"{name} may have {limit} {noun}, not {found}")


def _limit_size(fields: RawFields, name: str, where: str) -> None:
    size = len(bytes(fields.get(name, b"")))
    if size > MAX_FORMAT_CHARS:
        raise ValueError(f"{where} may have {MAX_FORMAT_CHARS} bytes, not {size}")


def _is_map(packed: msgspec.Raw | None) -> bool:
    first = bytes(packed)[:1] if packed is not None else b""
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def _count(packed: bytes) -> int:
    """Return the number of entries of an encoded array or map; 0 for any other value."""
    if not packed:
        return 0
    if 0x80 <= packed[0] <= 0x9F:
        return packed[0] & 0x0F
    return int.from_bytes(packed[1 : 1 + _COUNT_BYTES.get(packed[0], 0)], "big")
