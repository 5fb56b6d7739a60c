"""Every message of a worker can be read; the size limit applies to producers' messages."""

import pytest

from tests.support.large import large_result
from tokenmill_schemas import codec
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES, DecodeError, encode


def test_a_result_above_the_limit_of_requests_is_read() -> None:
    result = large_result("a")
    assert codec.decode_result(encode(result)) == result


def test_a_chunk_above_the_limit_of_requests_is_read() -> None:
    chunk = Chunk(job_id="a", index=0, text="x" * (MAX_PAYLOAD_BYTES + 1))
    assert codec.decode_chunk(encode(chunk)) == chunk


@pytest.mark.parametrize(
    "decode", [codec.decode_request, codec.decode_control, codec.decode_status]
)
def test_an_oversized_message_of_a_producer_is_refused_before_decoding(decode) -> None:
    with pytest.raises(
        DecodeError, match=rf"has {MAX_PAYLOAD_BYTES + 1} bytes; the limit is {MAX_PAYLOAD_BYTES}"
    ):
        decode(b"\x80" * (MAX_PAYLOAD_BYTES + 1))
