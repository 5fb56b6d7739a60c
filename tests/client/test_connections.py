"""What a connection costs beside its round trips."""

from importlib import metadata

import pytest

from api_client.connections import connect, connect_async

pytestmark = pytest.mark.redis


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> str:
        raise AssertionError(f"{name} was looked up again")

    monkeypatch.setattr(metadata, "version", refuse)


def test_threads_connections_look_no_version_up(redis_url: str, request: pytest.FixtureRequest) -> None:
    with connect(redis_url) as client:
        assert client.ping()
        request.getfixturevalue("nothing_installed")
        connections = [client.connection_pool.get_connection() for _ in range(3)]
        names = {entry["lib-name"] for entry in client.client_list() if entry.get("lib-name")}
        for connection in connections:
            client.connection_pool.release(connection)
    assert names == {"redis-py"}


async def test_a_loop_s_connections_look_no_version_up(redis_url: str, request: pytest.FixtureRequest) -> None:
    async with connect_async(redis_url) as client:
        assert await client.ping()
        request.getfixturevalue("nothing_installed")
        connections = [await client.connection_pool.get_connection() for _ in range(3)]
        for connection in connections:
            await client.connection_pool.release(connection)
