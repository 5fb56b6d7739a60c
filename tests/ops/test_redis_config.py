"""ops/redis/redis.conf is read by a real server and means what it says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.valkey import ValkeyServer

pytestmark = pytest.mark.redis
CONFIG = Path(__file__).parents[2] / "ops" / "redis" / "redis.conf"


def test_the_server_accepts_every_line(make_valkey: Callable[..., ValkeyServer]) -> None:
    server = make_valkey(settings={"include": str(CONFIG)})
    with server.client() as client:
        kept = client.config_get("appendonly", "appendfsync", "maxmemory-policy", "client-output-buffer-limit")
    assert kept["appendonly"] == "yes"
    assert kept["appendfsync"] == "everysec"
    assert kept["maxmemory-policy"] == "noeviction"
    assert "pubsub 16777216 4194304 20" in kept["client-output-buffer-limit"]
