"""OpenAI's request shapes mean the same at every entrance: the same job, or the same sentence."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from celery import Celery
from typer.testing import CliRunner

from tests.client.openai.openai_bodies import (
    REFUSED,
    SCHEMA,
    TAKEN,
    Body,
)
from tokenmill import AsyncClient, Client, InvalidRequest
from tokenmill.bulk.formats.input_file import BadLine, BatchDefaults, parse, to_request
from tokenmill.celery import generation_task
from tokenmill.cli import app
from tokenmill.testing import InMemoryQueue
from tokenmill_schemas.chat import Message
from tokenmill_schemas.codec import decode_request, encode
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.openai import CHAT_URL, COMPLETIONS_URL
from tokenmill_schemas.validation import problems

pytestmark = pytest.mark.redis

Entrance = Callable[[str, Body], JobRequest]  # raises InvalidRequest with the sentence
QUEUE = "q"
_FLAGS = {"max_tokens": "--max-tokens", "top_p": "--top-p"}
_SWITCHES = {
    "continue_final_message": "--continue-final-message",
    "add_generation_prompt": "--generation-prompt",
    "parallel_tool_calls": "--parallel-tool-calls",
}
_JSON_FLAGS = {
    "messages": "--messages",
    "chat_template_kwargs": "--chat-template-kwargs",
    "documents": "--documents",
    "tools": "--tools",
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
        elif name in _SWITCHES:
            arguments.append(_SWITCHES[name] if value else f"--no-{_SWITCHES[name][2:]}")
        elif name == "tool_choice":
            named = value if isinstance(value, str) else f"function:{value['function']['name']}"
            arguments += ["--tool-choice", named]
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
    what: dict[str, Any] = {
        "prompt": None,
        "prompt_ids": None,
        "messages": (Message("user", "Hi"),),
        "chat_template_kwargs": {},
        "documents": (),
        "continue_final_message": False,
        "add_generation_prompt": None,
        "tools": (),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    return {
        **what,
        **{name: fields[name] for name in fields if name in what},
        "params": SamplingParams(**params),
    }


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_an_openai_shape_gives_the_same_job_at_every_entrance(
    entrance: str, redis_url: str, allowed_keys: list[str]
) -> None:
    allowed_keys.append("tm:{q}:*")
    for shape, (body, fields) in TAKEN.items():
        if not fits(entrance, body):
            continue
        request = ENTRANCES[entrance](redis_url, body)
        expected = meant(fields)
        assert {name: getattr(request, name) for name in expected} == expected, shape


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_wrong_openai_shape_is_refused_with_the_same_sentence_at_every_entrance(
    entrance: str, redis_url: str
) -> None:
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


def test_a_schema_with_a_property_named_schema_is_not_taken_as_an_envelope() -> None:
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
