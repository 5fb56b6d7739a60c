"""MessagePack that the scripts write themselves, at the sizes where its form changes."""

from __future__ import annotations

import hashlib

import msgpack
import pytest
import redis

from tests.support.valkey import ControlledValkey
from tokenmill.transport.scripts import COMMON, Script, call, load_script
from tokenmill_schemas.keys import Keys

pytestmark = pytest.mark.redis

KEYS = Keys("q")
TEXT = load_script(COMMON).text + "\nreturn {pack_whole(tonumber(ARGV[3])), pack_text(ARGV[4])}"
PACK = Script("pack", TEXT, hashlib.sha1(TEXT.encode()).hexdigest())


@pytest.mark.parametrize("size", [0, 31, 32, 127, 128, 255, 256, 1_000, 65_535])
def test_scripts_encode_numbers_and_texts_of_each_messagepack_form(
    valkey: ControlledValkey, size: int
) -> None:
    text = "x" * size
    with redis.Redis.from_url(valkey.url) as server:
        for number in (size, size + 2**32):
            packed = call(server, PACK, KEYS.meta, KEYS.base, "PUBLISH", number, text)
            assert [msgpack.unpackb(one) for one in packed] == [number, text]
