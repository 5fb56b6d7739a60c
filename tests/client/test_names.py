"""Names and ids that are not Unicode, and wrong shapes: one sentence of a documented exception."""

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.databases import migrated_sqlite
from tokenmill import AsyncClient, Client, InvalidRequest, TokenmillError
from tokenmill.errors import ConfigurationError
from tokenmill.sql import SqlResults
from tokenmill.sql.webhooks import SqlWebhooks

LONE = "a\ud800"
CALLS: dict[str, Callable[[Any], Any]] = {
    "status": lambda client: client.status(LONE),
    "cancel": lambda client: client.cancel(LONE),
    "result": lambda client: client.result(LONE, timeout=1),
    "stream": lambda client: client.stream(LONE, timeout=1),
    "redrive": lambda client: client.redrive([LONE]),
    "set_limits": lambda client: client.set_limits(LONE, rate=1),
    "list": lambda client: client.list(LONE),
    "submit": lambda client: client.submit(prompt="x", tenant=LONE),
}


@pytest.mark.redis
@pytest.mark.parametrize("name", CALLS)
def test_a_lone_surrogate_raises_one_sentence_in_both_clients(name: str, redis_url: str) -> None:
    async def call_async() -> None:
        async with AsyncClient(redis_url, queue="q") as client:
            made = CALLS[name](client)
            if name == "stream":
                async for _ in made:
                    pass
            else:
                await made

    with Client(redis_url, queue="q") as client:
        for call in (lambda: list(CALLS[name](client)), lambda: asyncio.run(call_async())):
            with pytest.raises(TokenmillError, match=r"ud800|lone surrogate") as caught:
                call()
            str(caught.value).encode()  # any log and terminal can hold it
        assert client.depth().num_queued == 0  # the connection is still good


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("a queue's name", {"queue": LONE}),
        ("the key prefix", {"queue": "q", "prefix": LONE}),
        ("the URL", {"queue": "q", "url": f"redis://{LONE}:6379/0"}),
        ("the database URL", {"queue": "q", "database": f"sqlite:///{LONE}"}),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_with_names_that_are_not_unicode_is_refused(
    kind: type, what: str, arguments: dict[str, str]
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{what} holds a lone surrogate"):
        kind(**arguments)


def test_an_invalid_host_name_is_a_configuration_error() -> None:
    with (
        Client("redis://a..b:6379/0", queue="q") as client,
        pytest.raises(ConfigurationError, match="host"),
    ):
        client.depth()


@pytest.mark.parametrize(
    "call",
    [
        lambda url: SqlResults(url).get(LONE),
        lambda url: SqlResults(url).jobs(tenant=LONE),
        lambda url: SqlResults(url).usage(model=LONE),
        lambda url: SqlWebhooks(url).list(job_id=LONE),
        lambda url: SqlWebhooks(url).redrive([LONE]),
    ],
)
def test_a_lone_surrogate_in_a_database_call_raises_one_sentence(
    call: Callable[[str], object], tmp_path: Any
) -> None:
    url = migrated_sqlite(tmp_path / "t.db")
    with pytest.raises(InvalidRequest, match="no Unicode character"):
        call(url)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_value_of_a_wrong_shape_raises_the_documented_exception(kind: type) -> None:
    client = kind("redis://localhost:1/0", queue="q")
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(client.submit(messages=messages))
    assert type(caught.value) is InvalidRequest
    assert "FormError" not in "".join(traceback.format_exception(caught.value))
