"""The server's time does not depend on this machine's wall clock, nor on changes of it."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.support.topologies import ValkeyCluster
from tests.support.valkey import ControlledValkey
from tokenmill import AsyncClient, Client
from tokenmill.operations.io_requests import server_time
from tokenmill.transport.server_clock import FRESH_S, ServerClock

S = 1_000_000_000
SERVER = 1_800_000_000 * S


class Machine:
    """A wall clock that is off by hours, and a monotonic one."""

    def __init__(self) -> None:
        self.wall, self.monotonic = SERVER - 3_600 * S, 500 * S

    def clock(self) -> ServerClock:
        return ServerClock(lambda: self.wall, lambda: self.monotonic)

    def sleep(self, seconds: float) -> None:
        self.wall += round(seconds * S)
        self.monotonic += round(seconds * S)


def test_the_clock_shows_wall_clock_time_before_the_first_reading() -> None:
    machine = Machine()
    clock = machine.clock()
    assert (clock.now_ns(), clock.skew_s, clock.is_fresh) == (machine.wall, 0.0, False)


def test_the_clock_shows_the_server_s_time_after_a_reading_and_advances() -> None:
    machine = Machine()
    clock = machine.clock()
    clock.note(SERVER)
    machine.sleep(10)
    assert (clock.now_ns(), clock.now_ms()) == (SERVER + 10 * S, (SERVER + 10 * S) // 1_000_000)
    assert clock.skew_s == -3_600.0


def test_a_jump_of_the_wall_clock_does_not_change_the_server_s_time() -> None:
    machine = Machine()
    clock = machine.clock()
    clock.note(SERVER)
    machine.wall += 7_200 * S
    assert (clock.now_ns(), clock.skew_s) == (SERVER, 3_600.0)


def test_a_server_time_is_converted_to_the_monotonic_clock() -> None:
    machine = Machine()
    clock = machine.clock()
    clock.note(SERVER)
    assert clock.monotonic_s(SERVER // 1_000_000 + 2_500) == 502.5


def test_a_slow_reply_does_not_set_the_clock_back() -> None:
    machine = Machine()
    clock = machine.clock()
    clock.note(SERVER)
    machine.sleep(5)
    clock.note(SERVER + 3 * S)  # read 2 s before it arrived
    assert clock.now_ns() == SERVER + 5 * S


def test_a_server_whose_clock_was_set_back_is_followed_after_a_few_readings() -> None:
    machine = Machine()
    clock = machine.clock()
    clock.note(SERVER)
    for _ in range(4):
        clock.note(SERVER - 90 * S)
    assert clock.now_ns() == SERVER - 90 * S


@pytest.mark.parametrize(
    ("change", "is_fresh"),
    [
        (lambda machine: machine.sleep(FRESH_S - 1), True),
        (lambda machine: machine.sleep(FRESH_S + 1), False),
        (lambda machine: setattr(machine, "wall", machine.wall + 5 * S), False),
    ],
    ids=["a moment", "a minute", "a suspended machine"],
)
def test_a_reading_is_fresh_for_a_minute_of_undisturbed_clocks(
    change: Callable[[Machine], None], is_fresh: bool
) -> None:
    machine = Machine()
    clock = machine.clock()
    clock.note(SERVER)
    change(machine)
    assert clock.is_fresh is is_fresh


def shifted(seconds: float) -> ServerClock:
    return ServerClock(wall=lambda: time.time_ns() + round(seconds * S))


def near(moment_ms: float) -> bool:
    return abs(moment_ms - time.time() * 1000) < 30_000


@pytest.mark.redis
async def test_clients_read_the_server_s_clock_once_a_minute(redis_url: str) -> None:
    with Client(redis_url, queue="q") as client:
        client.clock = shifted(3_600)
        assert near(client.perform(server_time()))
        with redis.Redis.from_url(redis_url) as server:
            calls: Any = server.info("commandstats")
            client.perform(server_time())
            again: Any = server.info("commandstats")
            assert again["cmdstat_time"]["calls"] == calls["cmdstat_time"]["calls"]
    async with AsyncClient(redis_url, queue="q") as aclient:
        aclient.clock = shifted(-3_600)
        assert near(await aclient.perform(server_time()))


@pytest.mark.redis
def test_a_client_follows_a_server_whose_clock_is_behind_that_of_the_one_before(
    redis_url: str,
) -> None:
    passed = [0]
    clock = ServerClock(monotonic=lambda: time.monotonic_ns() + passed[0])
    clock.note(time.time_ns() + 90 * S)
    with redis.Redis.from_url(redis_url) as server:
        assert not near(clock.refresh(server, "any"))
        passed[0] = 120 * S  # the reading is old
        assert near(clock.refresh(server, "any"))


@pytest.mark.redis
async def test_a_cluster_s_time_is_that_of_the_queue_s_node() -> None:
    with ValkeyCluster() as cluster:
        with Client(cluster.url, queue="q") as client:
            client.clock = shifted(3_600)
            assert near(client.perform(server_time()))
        async with AsyncClient(cluster.url, queue="q") as aclient:
            aclient.clock = shifted(3_600)
            assert near(await aclient.perform(server_time()))


@pytest.mark.redis
def test_a_user_without_the_right_to_read_the_time_keeps_wall_clock_time(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    server = make_valkey()
    with server.client() as admin:
        admin.acl_setuser("old", enabled=True, nopass=True, keys="*", commands=["+@all", "-time"])
    with Client(f"redis://old:x@127.0.0.1:{server.port}/0", queue="q") as client:
        assert client.depth().num_queued == 0
        assert near(client.perform(server_time()))
