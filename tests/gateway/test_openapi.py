"""`/openapi.json` against the code, the routes and OpenAI's own parameters."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any, get_args, get_type_hints

import jsonschema_rs
import msgspec
import pytest

from tests.gateway.conftest import running_gateway
from tokenmill.openai.form_values import FormError
from tokenmill.openai.request_body import fields_of, parameters_of
from tokenmill_gateway.app import ALL_CALLS
from tokenmill_gateway.openapi import document_of
from tokenmill_gateway.parameters import manner_of, names_of
from tokenmill_gateway.shapes import BatchInput
from tokenmill_gateway.uploads import _FIELDS
from tokenmill_schemas.openai import CHAT_URL, COMPLETIONS_URL, RESPONSES_URL, URLS

DOCUMENT = document_of(ALL_CALLS)
LEAST: dict[str, dict[str, Any]] = {
    CHAT_URL: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS_URL: {"model": "m", "prompt": "x"},
    RESPONSES_URL: {"model": "m", "input": "x"},
}


def code_of(url: str, body: dict[str, Any]) -> str | None:
    """Return the code with which a body is refused; None if it is read."""
    try:
        fields_of(url, body)
    except FormError as error:
        return error.code
    return None


def test_every_route_and_every_parameter_is_described() -> None:
    described = {
        (method.upper(), path) for path, found in DOCUMENT["paths"].items() for method in found
    }
    assert described == {(call.method, call.plain_path) for call in ALL_CALLS}
    for call in ALL_CALLS:
        operation = DOCUMENT["paths"][call.plain_path][call.method.lower()]
        named = {parameter["name"].removesuffix("[]") for parameter in operation["parameters"]}
        in_path = set(re.findall(r"{(\w+)}", call.plain_path))
        assert named == in_path | set(call.query.__struct_fields__ if call.query else ())
        if call.path in URLS and call.body is not None:
            assert set(call.body.__struct_fields__) == set(names_of(call.path))
        assert ("security" in operation) is not call.is_public


def test_every_operation_has_an_id_of_its_own_and_every_reference_a_schema() -> None:
    ids = [one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))
    text = msgspec.json.encode(DOCUMENT).decode()
    named = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert named <= DOCUMENT["components"]["schemas"].keys()
    for name in DOCUMENT["components"]["schemas"]:
        jsonschema_rs.validator_for({**DOCUMENT, "$ref": f"#/components/schemas/{name}"})


@pytest.mark.parametrize("url", URLS)
def test_a_described_parameter_is_read_and_any_other_is_refused(url: str) -> None:
    taken, neutral = parameters_of(url)
    for name in taken:
        assert code_of(url, {**LEAST[url], name: {}}) != "unknown_parameter", name
    for name, values in neutral.items():
        for value in values:
            fields_of(url, {**LEAST[url], name: value})
        with pytest.raises(FormError) as refused:
            fields_of(url, {**LEAST[url], name: "something"})
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
    for name in ("nonsense", "temprature", "access_programs"):
        with pytest.raises(FormError) as refused:
            fields_of(url, {**LEAST[url], name: 1})
        assert (refused.value.param, refused.value.code) == (name, "unknown_parameter")
        assert manner_of(url, name) == ("refused", ())


def test_the_bodies_of_files_and_batches_are_described_as_they_are_read() -> None:
    upload = DOCUMENT["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    (form,) = upload.values()
    assert list(upload) == ["multipart/form-data"]
    fields = DOCUMENT["components"]["schemas"][form["schema"]["$ref"].rpartition("/")[2]]
    assert set(fields["properties"]) == {"file", *_FIELDS}
    assert fields["required"] == ["file", "purpose"]
    assert fields["properties"]["file"] == {"type": "string", "format": "binary"}
    begun = DOCUMENT["paths"]["/v1/batches"]["post"]["requestBody"]["content"]
    assert begun["application/json"]["schema"]["$ref"].endswith("/BatchInput")
    assert set(get_args(get_type_hints(BatchInput)["endpoint"])) == set(URLS)


@pytest.mark.redis
async def test_the_gateway_serves_the_document_without_a_key(redis_url: str, database: str) -> None:
    import asyncio

    async with running_gateway(redis_url, database, is_open=False) as gateway:

        def ask() -> bytes:
            with urllib.request.urlopen(f"{gateway.url}/openapi.json", timeout=30) as answer:
                return bytes(answer.read())

        assert json.loads(await asyncio.to_thread(ask)) == json.loads(json.dumps(DOCUMENT))
