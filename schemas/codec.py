"""Encoders and decoders, built once. MessagePack; unknown fields are ignored, so old and new bytes mix.

Depth and size are bounded before decoding: a payload is refused above `MAX_PAYLOAD_BYTES`.
"""

from typing import Final, TypeVar

import msgspec

from schemas.chunk import Chunk
from schemas.job import JobRequest
from schemas.result import JobResult

MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024

T = TypeVar("T")


def plain(value: object) -> str:
    """A text of a kind of its own (a job handle, say) travels as the text it is."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"objects of type {type(value).__name__} do not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
encode = _encoder.encode

_request_decoder = msgspec.msgpack.Decoder(JobRequest)
_result_decoder = msgspec.msgpack.Decoder(JobResult)
_chunk_decoder = msgspec.msgpack.Decoder(Chunk)


class DecodeError(ValueError):
    """The bytes are not what they should be; the message says what is wrong with them."""


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str, limit: int = MAX_PAYLOAD_BYTES) -> T:
    if len(data) > limit:
        raise DecodeError(f"{what} has {len(data)} bytes; the limit is {limit}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"{what} cannot be decoded: {error}") from error


def decode_request(data: bytes, limit: int = MAX_PAYLOAD_BYTES) -> JobRequest:
    """Raises DecodeError."""
    return _decode(_request_decoder, data, "job request", limit)


def decode_result(data: bytes) -> JobResult:
    """Raises DecodeError."""
    return _decode(_result_decoder, data, "job result")


def decode_chunk(data: bytes) -> Chunk:
    """Raises DecodeError."""
    return _decode(_chunk_decoder, data, "chunk")
