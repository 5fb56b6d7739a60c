"""A small disk gets full and free again, and holds a server's data."""

import pytest
import redis

from tests.support.small_disk import need_small_disk
from tests.support.valkey import ControlledValkey


def test_a_full_disk_refuses_writes_until_it_is_freed(tmp_path):
    with need_small_disk(tmp_path / "disk", 2) as disk:
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "other").write_bytes(b"x" * 8_192)
        disk.free()
        (disk.folder / "other").write_bytes(b"x" * 8_192)
        assert disk.free_bytes > 1 << 20
    assert not any((tmp_path / "disk").iterdir())


@pytest.mark.redis
def test_writes_confirmed_by_valkey_survive_a_full_disk(tmp_path):
    with need_small_disk(tmp_path / "disk", 32) as disk:
        always = {"appendfsync": "always"}
        with (
            ControlledValkey(disk.folder, settings=always) as server,
            server.client(retry=None) as client,
        ):
            client.set("before", 1)
            disk.fill()
            with pytest.raises(redis.RedisError):
                client.set("while it is full", b"x" * 100_000)
            disk.free()
            server.restart()  # the server ends itself when it cannot write, maybe not yet
            assert client.get("before") == b"1"
