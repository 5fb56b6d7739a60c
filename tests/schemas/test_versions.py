"""A request says which version of the wire its fields need; an older worker refuses it with a
sentence and never leaves such a field out.
"""

import json
from typing import Any, Literal

import msgspec
import pytest

from tests.schemas.recording import FOLDER
from tests.schemas.samples import PARAMS, REQUEST
from tokenmill.operations.job_request import build_request
from tokenmill_schemas.chat import Message
from tokenmill_schemas.codec import decode_request, encode
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.validation import problems
from tokenmill_schemas.versions import wire_version

HI = {"role": "user", "content": "Hi"}
CALLING = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
NEW: list[dict[str, Any]] = [
    {"messages": [HI], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [HI], "documents": [{"title": "T"}]},
    {"messages": [HI], "continue_final_message": True},
    {"messages": [HI], "add_generation_prompt": False},
    {"messages": [{**HI, "role": "developer"}]},
    {"messages": [{**HI, "name": "Al"}]},
    {"messages": [CALLING]},
    {"messages": [CALLING, {"role": "tool", "content": "7", "tool_call_id": "c"}]},
    {"messages": [{"role": "assistant", "content": "a", "reasoning": "b"}]},
    {"messages": [HI], "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"messages": [HI], "thinking_budget": 0},
    {"messages": [HI], "logprobs": True, "logprobs_mode": "raw_logprobs"},
    {"messages": [{**HI, "content": [{"type": "text", "text": t} for t in "ab"]}]},
]
THIRD: list[dict[str, Any]] = [
    {"messages": [HI], "prompt_logprobs": 0},
    {"messages": [HI], "continuations": ["a"]},
    {"prompt": "x", "echo": True},
]


class OldMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class OldRequest(msgspec.Struct):
    """A request as version 1 read it, with the fields that matter here."""

    job_id: str
    messages: tuple[OldMessage, ...] | None = None
    v: int = 1


def read_by_version_1(request: JobRequest) -> OldRequest:
    return msgspec.msgpack.decode(encode(request), type=OldRequest)


@pytest.mark.parametrize(
    ("arguments", "version"),
    [*((given, "2") for given in NEW), *((given, "3") for given in THIRD)],
    ids=lambda given: str(given)[:60],
)
def test_version_1_refuses_what_it_cannot_honour(arguments: dict[str, Any], version: str) -> None:
    request = build_request(arguments)
    assert request.v == version
    assert problems(request) == []
    assert decode_request(encode(request)) == request
    with pytest.raises(msgspec.ValidationError):
        read_by_version_1(request)


def test_a_request_of_version_1_keeps_its_bytes() -> None:
    request = build_request({"messages": [HI], "job_id": "a"})
    packed = msgspec.msgpack.decode(encode(request))
    old = {"job_id", "messages", "created_ms", "params", "retry", "metadata"}
    assert set(packed) <= old
    assert packed["messages"] == [HI]
    assert read_by_version_1(request).v == 1


def test_a_request_of_a_newer_version_is_refused_with_both_versions() -> None:
    for version in (4, "4"):
        request = JobRequest(job_id="a", prompt="x", v=version)
        assert problems(request) == [
            "the request needs version 4 of the wire format; this side reads up to version 3: "
            "update it"
        ]
    assert problems(JobRequest(job_id="a", prompt="x", v="two")) == [
        "v must be a version number, not 'two'"
    ]


def test_every_field_that_version_1_lacks_needs_a_later_one() -> None:
    """Its last recording has all that its workers read; they would leave out any other field."""
    known = json.loads((FOLDER / "3" / "values.json").read_text(encoding="utf-8"))["request"]
    for name in set(SamplingParams.__struct_fields__) - set(known["params"]):
        params = SamplingParams(**{name: getattr(PARAMS, name)})
        assert wire_version(JobRequest(job_id="a", prompt="x", params=params)) != 1, name
    # other forms of the recording's `messages`, and what means nothing without `tools`
    known |= dict.fromkeys(("prompt", "prompt_ids", "tool_choice", "parallel_tool_calls"))
    for name in set(JobRequest.__struct_fields__) - set(known):
        request = JobRequest(job_id="a", **{name: getattr(REQUEST, name)})
        assert wire_version(request) != 1, name


def test_the_version_is_the_least_that_is_needed() -> None:
    assert wire_version(JobRequest(job_id="a", messages=(Message("user", "x"),), v=2)) == 1
