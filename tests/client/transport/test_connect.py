"""Tests of connections: refused URL options, Unix sockets, Sentinels, and no version look-ups."""

from importlib import metadata
from typing import Any

import pytest

from tokenmill import AsyncClient, Client, ConfigurationError, QueueUnavailable
from tokenmill.transport.connect import connect, connect_async
from tokenmill_worker.local.valkey_server import free_port

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("kind", [connect, connect_async])
@pytest.mark.parametrize(
    "url", ["redis://h?pass=hunter2", "redis+sentinel://h/main?pass=hunter2", "unix:///s?pass=x"]
)
def test_an_unknown_option_is_refused_without_repeating_it(kind: Any, url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"has an option that Redis clients do not know$"):
        kind(url)


@pytest.mark.parametrize("kind", [connect, connect_async])
def test_a_socket_of_this_machine_may_be_named(kind: Any) -> None:
    options = kind("unix:///run/redis.sock?db=1").connection_pool.connection_kwargs
    assert (options["path"], options["db"]) == ("/run/redis.sock", 1)


async def test_sentinels_that_are_away_are_spoken_of_in_a_sentence() -> None:
    url = f"redis+sentinel://127.0.0.1:{free_port()}/main/0"
    with (
        Client(url, queue="q") as client,
        pytest.raises(QueueUnavailable, match=r"No master found for 'main'$"),
    ):
        client.depth()
    async with AsyncClient(url, queue="q") as aclient:
        with pytest.raises(QueueUnavailable, match=r"No master found for 'main'$"):
            await aclient.depth()


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> str:
        raise AssertionError(f"{name} was looked up again")

    monkeypatch.setattr(metadata, "version", refuse)


def test_threads_connections_look_no_version_up(
    redis_url: str, request: pytest.FixtureRequest
) -> None:
    with connect(redis_url) as client:
        assert client.ping()
        request.getfixturevalue("nothing_installed")
        connections = [client.connection_pool.get_connection() for _ in range(3)]
        names = {entry["lib-name"] for entry in client.client_list() if entry.get("lib-name")}
        for connection in connections:
            client.connection_pool.release(connection)
    assert names == {"redis-py"}


async def test_a_loop_s_connections_look_no_version_up(
    redis_url: str, request: pytest.FixtureRequest
) -> None:
    async with connect_async(redis_url) as client:
        assert await client.ping()
        request.getfixturevalue("nothing_installed")
        connections = [await client.connection_pool.get_connection() for _ in range(3)]
        for connection in connections:
            await client.connection_pool.release(connection)
