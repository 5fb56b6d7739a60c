"""Tests of connections: refused URL options, Unix sockets, Sentinels, and no version look-ups."""

from importlib import metadata
from typing import Any

import pytest
from redis.exceptions import ResponseError

from tokenmill import AsyncClient, Client, ConfigurationError, QueueUnavailable
from tokenmill.transport.connect import Link, connect, connect_async, parse_url, server_words
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.queue.scripts import translated_errors

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("kind", [connect, connect_async])
@pytest.mark.parametrize(
    "url", ["redis://h?pass=hunter2", "redis+sentinel://h/main?pass=hunter2", "unix:///s?pass=x"]
)
def test_an_unknown_url_option_is_refused_without_printing_its_value(kind: Any, url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"has an option that Redis clients do not know$"):
        kind(url)


@pytest.mark.parametrize("kind", [connect, connect_async])
def test_a_unix_socket_url_is_accepted(kind: Any) -> None:
    options = kind("unix:///run/redis.sock?db=1").connection_pool.connection_kwargs
    assert (options["path"], options["db"]) == ("/run/redis.sock", 1)


@pytest.mark.parametrize("kind", ["redis", "redis+sentinel", "redis+cluster"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("socket_timeout=3", 3.0),
        ("health_check_interval=10", 10),
        ("max_connections=50", 50),
        ("socket_keepalive=true", True),
    ],
)
def test_a_numeric_option_is_a_number_in_every_form_of_url(
    kind: str, option: str, value: object
) -> None:
    url = f"{kind}://h/{'' if kind != 'redis+sentinel' else 'main'}?{option}"
    name = option.partition("=")[0]
    if kind == "redis":
        pool = connect(url).connection_pool
        found = {**pool.connection_kwargs, "max_connections": pool.max_connections}
    else:
        found = parse_url(url).options
    assert found[name] == value
    assert type(found[name]) is type(value)


@pytest.mark.parametrize("kind", [connect, connect_async])
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://h?health_check_interval=x", "Invalid value for 'health_check_interval'"),
        ("redis+sentinel://h/main?socket_timeout=soon", "Invalid value for 'socket_timeout'"),
        ("redis+cluster://h?socket_timeout=soon", "Invalid value for 'socket_timeout'"),
        ("rediss://h?ssl_cert_reqs=CERT_WHAT", "Invalid SSL Certificate Requirements Flag"),
        ("rediss+sentinel://h/main?ssl_cert_reqs=may", "Invalid SSL Certificate Requirements Flag"),
        ("redis+cluster://h?db=3", "a Redis Cluster has only database 0"),
    ],
)
def test_a_url_option_with_an_impossible_value_is_refused_in_a_sentence(
    kind: Any, url: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        kind(url)


def test_options_of_a_cluster_url_are_read() -> None:
    url = "redis+cluster://h?require_full_coverage=false&reinitialize_steps=3&socket_timeout=2"
    expected = {"require_full_coverage": False, "reinitialize_steps": 3, "socket_timeout": 2.0}
    assert parse_url(url).options == expected
    with pytest.raises(ConfigurationError, match="option that cannot be"):
        parse_url("redis+cluster://h?reinitialize_steps=often")


@pytest.mark.parametrize("spelt", ["none", "CERT_NONE", "cert_none"])
@pytest.mark.parametrize("url", ["rediss://h/0", "rediss+sentinel://h/main"])
def test_certificates_are_left_unchecked_in_celery_s_spelling_too(url: str, spelt: str) -> None:
    pool = connect(f"{url}?ssl_cert_reqs={spelt}&ssl_check_hostname=false").connection_pool
    assert pool.connection_kwargs["ssl_cert_reqs"] == "none"


def test_a_sentinel_url_may_have_blanks_and_a_quoted_service() -> None:
    endpoint = parse_url(" REDIS+SENTINEL://a:26380, b , [::1]:26381/my%20service%2Fx/2 ")
    assert endpoint.hosts == (("a", 26380), ("b", 26379), ("::1", 26381))
    assert (endpoint.service, endpoint.options["db"]) == ("my service/x", 2)
    assert parse_url(" REDIS://h ").url == "redis://h"


async def test_unreachable_sentinels_are_an_error_of_one_sentence() -> None:
    url = f"redis+sentinel://127.0.0.1:{free_port()}/main/0"
    with (
        Client(url, queue="q") as client,
        pytest.raises(QueueUnavailable, match=r"No master found for 'main'$"),
    ):
        client.depth()
    async with AsyncClient(url, queue="q") as aclient:
        with pytest.raises(QueueUnavailable, match=r"No master found for 'main'$"):
            await aclient.depth()


async def test_a_worker_without_a_primary_reports_one_short_sentence() -> None:
    link = Link(retries=0)
    aclient = connect_async(f"redis+sentinel://127.0.0.1:{free_port()}/main/0", link)
    with pytest.raises(RedisUnavailable) as caught, translated_errors():
        await aclient.ping()
    await aclient.aclose()
    assert str(caught.value) == "cannot reach Redis: No master found for 'main'"


def test_a_script_error_is_reported_without_its_place_in_the_script(redis_url: str) -> None:
    with connect(redis_url) as client, pytest.raises(ResponseError, match="script:") as caught:
        client.eval("return redis.call('NOSUCH')", 0)
    assert "user_script" not in server_words(caught.value)
    assert server_words(caught.value).startswith("Unknown")
    of_redis_7 = f"OOM command not allowed. script: {'a7' * 20}, on @user_script:381."
    assert server_words(ResponseError(of_redis_7)) == "OOM command not allowed"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> str:
        raise AssertionError(f"{name} was looked up again")

    monkeypatch.setattr(metadata, "version", refuse)


def test_connections_of_threads_look_up_no_version_and_send_no_library_name(
    redis_url: str, request: pytest.FixtureRequest
) -> None:
    with connect(redis_url, Link(client_name="ours")) as client:
        assert client.ping()
        request.getfixturevalue("nothing_installed")
        connections = [client.connection_pool.get_connection() for _ in range(3)]
        ours = [entry for entry in client.client_list() if entry["name"] == "ours"]
        for connection in connections:
            client.connection_pool.release(connection)
    assert [entry.get("lib-name", "") for entry in ours] == [""] * len(ours)
    assert len(ours) >= 3


async def test_connections_of_an_event_loop_look_up_no_version(
    redis_url: str, request: pytest.FixtureRequest
) -> None:
    async with connect_async(redis_url) as client:
        assert await client.ping()
        request.getfixturevalue("nothing_installed")
        connections = [await client.connection_pool.get_connection() for _ in range(3)]
        for connection in connections:
            await client.connection_pool.release(connection)
