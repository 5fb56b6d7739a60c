"""OpenAI's request shapes mean the same at every entrance: the same job, or the same sentence."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import pytest
from celery import Celery
from typer.testing import CliRunner

from tokenmill import AsyncClient, Client, InvalidRequest
from tokenmill.bulk.formats.input_file import BadLine, BatchDefaults, parse, to_request
from tokenmill.celery import generation_task
from tokenmill.cli import app
from tokenmill.testing import InMemoryQueue
from tokenmill_schemas.codec import decode_request, encode
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest, Message
from tokenmill_schemas.openai import CHAT_URL, COMPLETIONS_URL
from tokenmill_schemas.validation import problems

pytestmark = pytest.mark.redis

Body = Mapping[str, Any]
Entrance = Callable[[str, Body], JobRequest]  # raises InvalidRequest with the sentence
QUEUE = "q"
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
_FLAGS = {"max_tokens": "--max-tokens", "top_p": "--top-p"}
_JSON_FLAGS = {
    "messages": "--messages",
    "response_format": "--response-format",
    "logit_bias": "--logit-bias",
}


def stored(url: str, job_id: str) -> JobRequest:
    with Client(url, queue=QUEUE) as client:
        packed = cast("bytes", client._redis.hget(client.keys.job(job_id), "request"))
    return decode_request(packed)


def by_client(url: str, body: Body) -> JobRequest:
    with Client(url, queue=QUEUE) as client:
        return stored(url, client.submit(**body))


def by_many(url: str, body: Body) -> JobRequest:
    with Client(url, queue=QUEUE) as client:
        return stored(url, client.submit_many([body])[0])


def by_async_client(url: str, body: Body) -> JobRequest:
    async def submit() -> str:
        async with AsyncClient(url, queue=QUEUE) as client:
            return await client.submit(**body)

    return stored(url, asyncio.run(submit()))


def by_command_line(url: str, body: Body) -> JobRequest:
    arguments = ["submit", *([body["prompt"]] if isinstance(body.get("prompt"), str) else [])]
    for name, value in body.items():
        if name in _JSON_FLAGS:
            arguments += [_JSON_FLAGS[name], json.dumps(value)]
        elif name in _FLAGS:
            arguments += [_FLAGS[name], str(value)]
        elif name == "stop":
            for text in [value] if isinstance(value, str) else value:
                arguments += ["--stop", text]
    done = CliRunner().invoke(
        app, arguments, env={"TOKENMILL_REDIS_URL": url, "TOKENMILL_QUEUE": QUEUE}
    )
    if done.exit_code:
        raise InvalidRequest([" ".join(done.stderr.removeprefix("Error: ").split())])
    return stored(url, done.stdout.strip())


def by_celery(url: str, body: Body) -> JobRequest:
    task = generation_task(
        Celery("forms", broker="memory://", backend="cache+memory://"), queue=QUEUE, url=url
    )
    try:
        return stored(url, task.delay(**body).id)
    finally:
        task.client.close()


def by_bulk_line(url: str, body: Body) -> JobRequest:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": CHAT_URL if "messages" in body else COMPLETIONS_URL,
        "body": {"model": "m", **body},
    }
    parsed = parse(1, json.dumps(line).encode())
    assert not isinstance(parsed, BadLine)
    request = to_request(parsed, BatchDefaults("batch_1"))
    if isinstance(request, BadLine):
        assert request.status == 400
        assert request.param
        raise InvalidRequest([request.message])
    return request


def by_queue_in_memory(url: str, body: Body) -> JobRequest:
    with InMemoryQueue() as queue:
        client = queue.client()
        client.result(client.submit(**body), timeout=30)
        return queue.requests[0]


ENTRANCES: dict[str, Entrance] = {
    "Client.submit": by_client,
    "Client.submit_many": by_many,
    "AsyncClient.submit": by_async_client,
    "command line": by_command_line,
    "Celery task": by_celery,
    "bulk line": by_bulk_line,
    "InMemoryQueue": by_queue_in_memory,
}


def chat(*messages: Any, **others: Any) -> Body:
    return {**CHAT, "messages": list(messages), **others}


def formatted(wanted: Any) -> Body:
    return {**CHAT, "response_format": wanted}


def envelope(**inner: Any) -> Body:
    return formatted(
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **inner}}
    )


def part(**given: Any) -> Body:
    return chat({"role": "user", "content": [{"type": "text", "text": "See"}, given]})


TAKEN: dict[str, tuple[Body, dict[str, Any]]] = {
    "a strict schema": (
        envelope(strict=True, description="d"),
        {"response_format": ResponseFormat(json_schema=SCHEMA, strict=True)},
    ),
    "a schema without strict": (
        envelope(), {"response_format": ResponseFormat(json_schema=SCHEMA, strict=False)},
    ),
    "strict of null": (
        envelope(strict=None), {"response_format": ResponseFormat(json_schema=SCHEMA, strict=False)},
    ),
    "any object": (
        formatted({"type": "json_object"}), {"response_format": ResponseFormat(json_schema={})},
    ),
    "text": (formatted({"type": "text"}), {}),
    "a schema of ours": (
        formatted({"json_schema": SCHEMA}), {"response_format": ResponseFormat(json_schema=SCHEMA)},
    ),
    "a pattern of ours": (formatted({"regex": "a+"}), {"response_format": ResponseFormat(regex="a+")}),
    "a developer and text parts": (
        chat(
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "Hi"},
        ),
        {"messages": (Message("system", "Be brief"), Message("user", "Hi"))},
    ),
    "an answer of OpenAI's in the history": (
        chat(
            {"role": "assistant", "content": "Yes", "refusal": None, "annotations": [], "tool_calls": None},
            {"role": "assistant", "content": None, "refusal": "No"},
            {"role": "user", "content": "Why?"},
        ),
        {"messages": (Message("assistant", "Yes"), Message("assistant", "No"), Message("user", "Why?"))},
    ),
    "top_p of zero": ({**CHAT, "top_p": 0}, {"top_p": 0.0}),
    "biases by text keys": ({**CHAT, "logit_bias": {"5": -1, "7": 2.5}}, {"logit_bias": {5: -1.0, 7: 2.5}}),
    "one stop text": ({**CHAT, "stop": "END"}, {"stop": ("END",)}),
    "several stop texts": ({**CHAT, "stop": ["a", "b", "c", "d", "e"]}, {"stop": ("a", "b", "c", "d", "e")}),
    "the newer name of max_tokens": (
        {"messages": CHAT["messages"], "max_completion_tokens": 9, "max_tokens": 4}, {"max_tokens": 9},
    ),
    "a prompt": ({"prompt": "Once", "max_tokens": 4}, {"prompt": "Once", "messages": None}),
    "a list of one prompt": ({"prompt": ["Once"], "max_tokens": 4}, {"prompt": "Once", "messages": None}),
    "a prompt of token ids": ({"prompt": [1, 2], "max_tokens": 4}, {"prompt_ids": (1, 2), "messages": None}),
}  # fmt: skip

REFUSED: dict[str, tuple[Body, str]] = {
    "an unknown key of a format": (
        formatted({"jsonschema": SCHEMA}), "response_format has the unknown key 'jsonschema'",
    ),
    "an unknown key beside a type": (
        formatted({"type": "json_object", "schema": SCHEMA}), "response_format has the unknown key 'schema'",
    ),
    "a schema without its envelope": (
        formatted({"type": "json_schema", "json_schema": SCHEMA}),
        "response_format.json_schema has the unknown key 'type'; it takes name, description, schema, strict",
    ),
    "an envelope without a type": (
        formatted({"json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}),
        "response_format.json_schema holds OpenAI's envelope",
    ),
    "an envelope without a schema": (
        formatted({"type": "json_schema", "json_schema": {"name": "n"}}),
        "response_format.json_schema.schema must be a JSON schema",
    ),
    "no envelope": (
        formatted({"type": "json_schema"}),
        "response_format.json_schema must be an object with name, strict and schema",
    ),
    "strict of a number": (envelope(strict=1), "response_format.json_schema.strict must be true or false, not 1"),
    "another type": (
        formatted({"type": "grammar"}),
        "response_format.type must be one of text, json_object, json_schema, not 'grammar'",
    ),
    "a format that is a text": (formatted("json"), "response_format must be an object"),
    "an unknown key of a message": (
        chat({"role": "user", "content": "Hi", "weight": 1}), "messages[0] has the unknown key 'weight'",
    ),
    "tool calls": (
        chat({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}),
        "messages[0].tool_calls is not supported here",
    ),
    "a name": (chat({"role": "user", "content": "Hi", "name": "Al"}), "messages[0].name is not supported here"),
    "another role": (
        chat({"role": "wizard", "content": "Hi"}),
        "messages[0].role must be one of developer, system, user, assistant, tool, not 'wizard'",
    ),
    "no content": (
        chat({"role": "user"}), "messages[0].content must be a text or a list of text parts",
    ),
    "a refusal of the user": (
        chat({"role": "user", "content": "Hi", "refusal": "No"}), "messages[0].refusal is an assistant's only",
    ),
    "an image": (
        part(type="image_url", image_url={"url": "data:"}),
        "messages[0].content[1] is a part of type 'image_url'; only text parts are supported",
    ),
    "audio": (
        part(type="input_audio", input_audio={"data": "", "format": "wav"}),
        "messages[0].content[1] is a part of type 'input_audio'; only text parts are supported",
    ),
    "a part without a type": (
        part(text="Hi"), "messages[0].content[1] is a part without a type; only text parts are supported",
    ),
    "an unknown key of a part": (
        part(type="text", text="Hi", cache_control={"type": "ephemeral"}),
        "messages[0].content[1] has the unknown key 'cache_control'",
    ),
    "a part without its text": (part(type="text"), "messages[0].content[1].text must be a text"),
    "a message that is a text": (chat("Hi"), "messages[0] must be a message with role and content"),
    "no messages": (chat(), "messages is empty; it needs at least one message"),
    "a bias that is a text": (
        {**CHAT, "logit_bias": {"5": "1"}}, "logit_bias must be a map from token ids to numbers",
    ),
    "a bias of a word": ({**CHAT, "logit_bias": {"dog": 1}}, "logit_bias must be a map from token ids to numbers"),
    "too many stop texts": ({**CHAT, "stop": ["a"] * 17}, "stop may have 16 strings, not 17"),
    "a stop that is a map": ({**CHAT, "stop": {"a": 1}}, "stop must be a text or a list of texts"),
    "several prompts": (
        {"prompt": ["a", "b"], "max_tokens": 4},
        "prompt must be one text or one list of token ids; several prompts are several jobs",
    ),
    "top_p above one": ({**CHAT, "top_p": 1.5}, "top_p must be from 0 to 1, not 1.5"),
}  # fmt: skip


def fits(entrance: str, body: Body) -> bool:
    """A shell cannot write every shape: it has one prompt of text, texts to stop at, and one name
    for the length.
    """
    if entrance != "command line":
        return True
    is_text = isinstance(body.get("prompt", ""), str)
    return (
        is_text and not isinstance(body.get("stop"), dict) and "max_completion_tokens" not in body
    )


def meant(fields: dict[str, Any]) -> dict[str, Any]:
    """Return all that a request shape decides about a job."""
    params = {
        "max_tokens": 4,
        **{name: fields[name] for name in fields if name in SamplingParams.__struct_fields__},
    }
    what = {"prompt": None, "prompt_ids": None, "messages": (Message("user", "Hi"),)}
    return {
        **what,
        **{name: fields[name] for name in fields if name in what},
        "params": SamplingParams(**params),
    }


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_shape_gives_the_same_job(entrance: str, redis_url: str, allowed_keys: list[str]) -> None:
    allowed_keys.append("tm:{q}:*")
    for shape, (body, fields) in TAKEN.items():
        if not fits(entrance, body):
            continue
        request = ENTRANCES[entrance](redis_url, body)
        found = {
            name: getattr(request, name) for name in ("prompt", "prompt_ids", "messages", "params")
        }
        assert found == meant(fields), shape


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_shape_is_refused_with_the_same_sentence(entrance: str, redis_url: str) -> None:
    for shape, (body, sentence) in REFUSED.items():
        if not fits(entrance, body):
            continue
        with pytest.raises(InvalidRequest) as caught:
            ENTRANCES[entrance](redis_url, body)
        assert sentence in str(caught.value), shape


@pytest.mark.parametrize("type_name", [None, "json_schema"])
def test_a_worker_refuses_the_envelope_of_an_older_client(type_name: str | None) -> None:
    """An older client sends the envelope as the schema; as a schema it would admit any answer."""
    wanted = {"type": type_name, "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    packed = msgspec.msgpack.encode(
        {"job_id": "a", "prompt": "x", "params": {"response_format": wanted}}
    )
    (sentence,) = problems(decode_request(packed), is_decoded=True)
    assert sentence.startswith("response_format.json_schema holds OpenAI's envelope")


def test_a_schema_with_a_property_called_schema_is_no_envelope() -> None:
    schema: dict[str, object] = {
        "type": "object",
        "properties": {"schema": {}, "name": {}, "strict": {}},
    }
    request = JobRequest(
        job_id="a",
        prompt="x",
        params=SamplingParams(response_format=ResponseFormat(json_schema=schema)),
    )
    assert problems(decode_request(encode(request)), is_decoded=True) == []
