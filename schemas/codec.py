"""Encoders and decoders, built once. MessagePack; unknown fields are ignored, so old and new bytes mix.

Depth and size are bounded before decoding: a payload is refused above `MAX_PAYLOAD_BYTES`, and a large request
whose parts are too many before they are built.
"""

from typing import Final, TypeVar

import msgspec

from schemas.bounds import HARMLESS_BYTES, with_whole_keys, without_bombs
from schemas.chunk import Chunk
from schemas.control import ControlMessage, WorkerStatus
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
_control_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_status_decoder = msgspec.msgpack.Decoder(WorkerStatus)


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
    if HARMLESS_BYTES < len(data) <= limit:
        try:
            data = without_bombs(data)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise DecodeError(f"job request cannot be decoded: {error}") from error
    try:
        return _decode(_request_decoder, data, "job request", limit)
    except DecodeError:
        mended = with_whole_keys(data) if len(data) <= limit else None
        if mended is None:
            raise
        return _decode(_request_decoder, mended, "job request", len(mended))


def decode_result(data: bytes) -> JobResult:
    """Raises DecodeError."""
    return _decode(_result_decoder, data, "job result")


def decode_chunk(data: bytes) -> Chunk:
    """Raises DecodeError."""
    return _decode(_chunk_decoder, data, "chunk")


def decode_control(data: bytes) -> ControlMessage:
    """Raises DecodeError."""
    return _decode(_control_decoder, data, "control message")


def decode_status(data: bytes) -> WorkerStatus:
    """Raises DecodeError."""
    return _decode(_status_decoder, data, "worker status")
