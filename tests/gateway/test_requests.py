"""Wrong keys, bodies and paths: each has its status and one sentence, and the next one works."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.gateway.conftest import MODEL, Gateway, new_key, running_gateway
from tests.support.waiting import until
from tests.support.worker import running_worker
from tokenmill_gateway.keys import KeyStore

pytestmark = pytest.mark.redis
BODY: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}
JSON = {"content-type": "application/json"}


async def call(
    gateway: Gateway,
    path: str,
    data: bytes | None = None,
    headers: dict[str, str] | None = None,
    method: str | None = None,
) -> tuple[int, dict[str, Any], dict[str, str]]:
    def ask() -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(
            gateway.url + path, data, {**JSON, **(headers or {})}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)

    status, answer, found = await asyncio.to_thread(ask)
    return status, json.loads(answer), found


async def refused(gateway: Gateway, *arguments: Any, **more: Any) -> tuple[int, str]:
    """Return the status and the code of a refusal, whose body is OpenAI's."""
    status, body, _ = await call(gateway, *arguments, **more)
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return status, error["code"]


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000


WRONG_BODIES: list[tuple[bytes, dict[str, str], int, str]] = [
    (b"{", {}, 400, "invalid_json"),
    (b"[1]", {}, 400, "invalid_json"),
    (b'{"model": NaN}', {}, 400, "invalid_json"),
    (b'{"model": "\xff"}', {}, 400, "invalid_json"),
    (DEEP, {}, 400, "invalid_json"),
    (b'{"model": "a", "model": "synthetic", "input": "x"}', {}, 400, "invalid_json"),
    (b'{"model": "a", "input": "x", "metadata": {"b": "1", "b": "2"}}', {}, 400, "invalid_json"),
    (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    (b'"' + b"x" * 9_000_000 + b'"', {}, 413, "request_too_large"),
    (b"{}", {f"x-{n}": "y" for n in range(200)}, 431, "headers_too_large"),
    (b"{}", {"x-long": "y" * 40_000}, 431, "headers_too_large"),
    (b"{}", {}, 400, "missing_required_parameter"),
    (b'{"model": "other", "input": "x"}', {}, 404, "model_not_found"),
    (b'{"model": "synthetic", "input": "\\ud800"}', {}, 400, "invalid_json"),
]


async def test_a_wrong_body_has_its_status_and_the_next_one_is_answered(gateway: Gateway) -> None:
    for data, headers, *wanted in WRONG_BODIES:
        found = await refused(gateway, "/v1/responses", data, headers)
        assert (data[:40], *found) == (data[:40], *wanted)
    answered, body, _ = await call(gateway, "/v1/responses", json.dumps(BODY).encode())
    assert (answered, body["status"] in ("completed", "incomplete")) == (200, True)


async def test_an_unknown_path_or_method_is_refused(gateway: Gateway) -> None:
    assert await refused(gateway, "/v1/nothing") == (404, "unknown_url")
    assert await refused(gateway, "/v1/models/") == (404, "model_not_found")
    assert await refused(gateway, "/v1/models", b"{}") == (405, "method_not_allowed")
    assert await refused(gateway, "/v1/responses/x") == (404, "not_found")
    assert await refused(gateway, "/v1/responses/chatcmpl-x/cancel", b"") == (404, "not_found")


async def test_without_a_valid_key_there_is_no_call(redis_url: str, database: str) -> None:
    good = new_key(database, "acme")
    reader = new_key(database, "acme", permission="read")
    other = new_key(database, "acme", models=["other"])
    late = new_key(database, "acme", expires_ms=1)
    revoked = new_key(database, "acme")
    store = KeyStore(database, "secret")
    store.revoke(revoked.split("-")[1])
    data = json.dumps(BODY).encode()
    async with (
        running_worker(redis_url, database),
        running_gateway(redis_url, database, is_open=False) as gateway,
    ):
        said = set()
        for key in ("", "x", late, revoked, good[:-1] + "_", f"tmk-abcdefgh-{'x' * 43}"):
            headers = {"authorization": f"Bearer {key}"}
            status, body, _ = await call(gateway, "/v1/responses", data, headers)
            said.add((status, body["error"]["message"]))
        assert len(said) == 1
        assert next(iter(said))[0] == 401
        assert await refused(gateway, "/v1/responses", data) == (401, "invalid_api_key")
        as_reader = {"authorization": f"Bearer {reader}"}
        assert await refused(gateway, "/v1/responses", data, as_reader) == (403, "read_only_key")
        as_other = {"authorization": f"Bearer {other}"}
        assert await refused(gateway, "/v1/responses", data, as_other) == (403, "model_not_allowed")
        status, _, headers = await call(
            gateway, "/v1/responses", data, {"authorization": f"Bearer {good}"}
        )
        assert status == 200
    store.close()


def test_the_database_has_no_key_but_its_hash(database: str) -> None:
    key = new_key(database, "acme", label="web")
    store = KeyStore(database, "secret")
    (listed,) = store.list("acme")
    _, digest = store.read(listed.id) or (None, b"")
    store.close()
    assert (listed.label, key.split("-")[1]) == ("web", listed.id)
    assert (digest == store.hash_of(key), len(digest)) == (True, 32)
    assert key.encode() not in digest


WRONG_TYPES: list[dict[str, Any]] = [
    {"tools": [1]}, {"tools": "x"}, {"text": "x"}, {"text": {"format": 1}}, {"reasoning": "x"},
    {"input": [1, None]}, {"input": 5}, {"metadata": [1]}, {"prompt_cache_key": 5},
    {"instructions": 5}, {"stream": "yes"}, {"model": 5}, {"background_options": []},
    {"temperature": "hot"}, {"top_logprobs": "many"}, {"previous_response_id": 5},
    {"service_tier": []}, {"tool_choice": 5}, {"stop": 5}, {"max_output_tokens": 10**30},
]  # fmt: skip


async def test_a_member_of_a_wrong_type_is_a_bad_request(gateway: Gateway) -> None:
    for wrong in WRONG_TYPES:
        data = json.dumps({**BODY, **wrong}).encode()
        status, _ = await refused(gateway, "/v1/responses", data)
        assert (wrong, status) == (wrong, 400)


async def test_a_gateway_without_models_finds_the_queues_of_the_server(
    redis_url: str, database: str
) -> None:
    async with (
        running_worker(redis_url, database, queue=MODEL),
        running_gateway(redis_url, database, models={}) as first,
        running_gateway(redis_url, database, models={}) as second,
    ):

        async def is_listed() -> bool:
            _, listed, _ = await call(second, "/v1/models")
            names = [model["id"] for model in listed["data"]]
            assert "" not in names  # a worker that starts has no name yet
            return names == [MODEL]

        await until(is_listed)  # once its worker has told its name
        data = json.dumps({**BODY, "background": True}).encode()
        _, made, _ = await call(first, "/v1/responses", data)
        status, found, _ = await call(second, f"/v1/responses/{made['id']}")
        assert (status, found["id"]) == (200, made["id"])
        other = json.dumps({**BODY, "model": "other"}).encode()
        assert await refused(first, "/v1/responses", other) == (404, "model_not_found")
