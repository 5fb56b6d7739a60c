"""Encoders and decoders, built once. The format is MessagePack; unknown fields are ignored, so that
old and new versions can read each other.

Messages from producers (requests and control messages) are rejected above `MAX_PAYLOAD_BYTES`. A
large request is rejected before decoding when one of its lists is too long. Chunks and results have
no size limit: workers write them, and every record that a worker wrote must be readable.
"""

from typing import Final, TypeVar

import msgspec

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import ControlMessage, WorkerStatus
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult
from tokenmill_schemas.size_limits import HARMLESS_BYTES, reject_oversized, with_whole_keys

MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024

T = TypeVar("T")


def as_str(value: object) -> str:
    """Return the plain `str` of a subclass such as JobHandle; msgspec encodes no subclasses."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"objects of type {type(value).__name__} do not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=as_str)
encode = _encoder.encode

_request_decoder = msgspec.msgpack.Decoder(JobRequest)
_result_decoder = msgspec.msgpack.Decoder(JobResult)
_chunk_decoder = msgspec.msgpack.Decoder(Chunk)
_control_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_status_decoder = msgspec.msgpack.Decoder(WorkerStatus)


class DecodeError(ValueError):
    """The bytes do not have the expected form; the message says what is wrong with them."""


def _bounded(data: bytes, what: str, limit: int = MAX_PAYLOAD_BYTES) -> bytes:
    if len(data) > limit:
        raise DecodeError(f"{what} has {len(data)} bytes; the limit is {limit}")
    return data


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"{what} cannot be decoded: {error}") from error


def decode_request(data: bytes, limit: int = MAX_PAYLOAD_BYTES) -> JobRequest:
    """Decode a job request of at most `limit` bytes. Raises DecodeError."""
    if len(_bounded(data, "job request", limit)) > HARMLESS_BYTES:
        try:
            data = reject_oversized(data)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise DecodeError(f"job request cannot be decoded: {error}") from error
    try:
        return _decode(_request_decoder, data, "job request")
    except DecodeError:
        mended = with_whole_keys(data)
        if mended is None:
            raise
        return _decode(_request_decoder, mended, "job request")


def decode_result(data: bytes) -> JobResult:
    """Decode a job's result. Raises DecodeError."""
    return _decode(_result_decoder, data, "job result")


def decode_chunk(data: bytes) -> Chunk:
    """Decode a chunk. Raises DecodeError."""
    return _decode(_chunk_decoder, data, "chunk")


def decode_control(data: bytes) -> ControlMessage:
    """Decode a control message. Raises DecodeError."""
    return _decode(_control_decoder, _bounded(data, "control message"), "control message")


def decode_status(data: bytes) -> WorkerStatus:
    """Decode a worker's status. Raises DecodeError."""
    return _decode(_status_decoder, _bounded(data, "worker status"), "worker status")
