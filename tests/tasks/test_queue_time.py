"""The tasks' due times are by the Redis server's clock."""

import time
from collections.abc import Callable

import pytest

from tests.support.valkey import ControlledValkey
from tokenmill.transport.server_clock import ServerClock
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.settings import Settings, load_settings
from tokenmill_worker.tasks.resources import QueueTime


def shifted() -> ServerClock:
    return ServerClock(wall=lambda: time.time_ns() + 3_600 * 1_000_000_000)


def settings(url: str) -> Settings:
    return load_settings({"redis_url": url}, strict=False)


@pytest.mark.redis
def test_the_server_s_time_is_kept_while_the_server_is_unreachable(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    server = make_valkey()
    now = QueueTime(settings(server.url), shifted())
    assert abs(now() - time.time()) < 30
    server.stop()
    assert abs(now() - time.time()) < 30


def test_without_a_server_the_wall_clock_s_time_is_used() -> None:
    now = QueueTime(settings(f"redis://127.0.0.1:{free_port()}/0"), shifted())
    assert abs(now() - time.time() - 3_600) < 30
