"""Validation gives a producer one sentence per problem at once, with the field and the value."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill_schemas.chat import FunctionCall, Message, ToolCall
from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest, RetryPolicy
from tokenmill_schemas.validation import params_problems, problems

ECHO = SamplingParams(echo=True)
NAN, INF = math.nan, math.inf
ENVELOPES: list[dict[str, object]] = [
    {"name": "n", "strict": True, "schema": {"type": "object"}},
    {"schema": {"type": "object"}},
    {"name": "n", "description": "d"},
]


def request(**fields: Any) -> JobRequest:
    return JobRequest(**({"job_id": "job", "prompt": "hi"} | fields))


def test_a_valid_request_has_no_problem():
    params = SamplingParams(
        max_tokens=64, min_tokens=2, temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, seed=-7,
        stop=("\n", "END"),
        stop_token_ids=(1, 2), presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.1,
        logit_bias={5: -100},
        logprobs=5, top_logprobs=20, n=4,
        response_format=ResponseFormat(json_schema={"type": "object"}),
    )  # fmt: skip
    full = request(
        params=params, model="m", tenant="acme", idempotency_key="k", deadline_ms=2_000,
        not_before_ms=1_500,
        metadata={"a": "b"}, webhook="https://example.org/hook?x=1", batch_id="b",
        traceparent="00-ab-cd-01",
        retry=RetryPolicy(max_attempts=1, backoff_ms=0),
    )  # fmt: skip
    assert problems(full, now_ms=1_000) == []
    assert problems(request(prompt=None, messages=(Message("user", ""),))) == []
    assert problems(request(prompt=None, prompt_ids=(0, 1))) == []
    assert problems(request(prompt="日本 👩 \n\t\0")) == []


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"job_id": ""}, "job_id must not be empty"),
        (
            {"params": SamplingParams(logprobs_mode="cooked")},
            "logprobs_mode must be raw_logprobs or processed_logprobs, not 'cooked'",
        ),
        ({"job_id": "x" * 256}, "job_id may have 255 characters, not 256"),
        ({"tenant": "a\nb"}, "tenant must not contain control characters: 'a\\nb'"),
        ({"idempotency_key": ""}, "idempotency_key must not be empty; leave it out instead"),
        (
            {"prompt": None},
            "exactly one of prompt, messages and prompt_ids must be given, not none",
        ),
        (
            {"prompt_ids": ()},
            "exactly one of prompt, messages and prompt_ids must be given, not prompt and "
            "prompt_ids",
        ),
        ({"prompt": ""}, "prompt is empty; it needs at least one token"),
        ({"prompt": None, "prompt_ids": ()}, "prompt_ids is empty; it needs at least one token"),
        ({"prompt": None, "messages": ()}, "messages is empty; it needs at least one message"),
        ({"prompt": None, "prompt_ids": (3, -1)}, "prompt_ids holds -1, which is no token id"),
        (
            {"prompt": None, "prompt_ids": (2**31,)},
            "prompt_ids holds 2147483648, which is no token id",
        ),
        (
            {"prompt": "a\ud800"},
            "prompt is not valid Unicode: a lone surrogate stands at character 1",
        ),
        (
            {"metadata": {"k": "\udfff"}},
            "metadata is not valid Unicode: a lone surrogate stands at character 0",
        ),
        ({"metadata": {"k": "\0"}}, "metadata['k'] must not contain a null character"),
        ({"metadata": {str(i): "" for i in range(65)}}, "metadata may have 64 entries, not 65"),
        ({"metadata": {"k": "x" * 5000}}, "metadata['k'] may have 4096 characters, not 5000"),
        ({"deadline_ms": 400}, "deadline_ms lies 600 ms in the past"),
        ({"deadline_ms": -1}, "deadline_ms must be a time in Unix milliseconds, not -1"),
        (
            {"deadline_ms": 2000, "not_before_ms": 2000},
            "not_before_ms (2000) must lie before deadline_ms (2000)",
        ),
        ({"retry": RetryPolicy(max_attempts=0)}, "retry.max_attempts must be from 1 to 100, not 0"),
        (
            {"retry": RetryPolicy(backoff_ms=-1)},
            "retry.backoff_ms must be from 0 to 604800000, not -1",
        ),
        (
            {"webhook": "file:///etc/passwd"},
            "webhook must be an http or https URL of at most 2048 characters",
        ),
        (
            {"messages": (Message("user", "x"),) * 10_001, "prompt": None},
            "messages may have 10000 entries, not 10001",
        ),
        (
            {"messages": (Message("user", "x"),), "prompt": None, "params": ECHO},
            "echo needs prompt or prompt_ids",
        ),
        (
            {"params": msgspec.structs.replace(ECHO, response_format=ResponseFormat(regex="a"))},
            "echo cannot be given with response_format: the prompt need not have that form",
        ),
        (
            {"prompt": "a" * 1_500_000, "params": msgspec.structs.replace(ECHO, n=3)},
            "echo repeats the prompt in each answer: 4500000 characters or ids in all, where "
            "4194304 are allowed",
        ),
    ],
)
def test_each_problem_of_a_request_is_reported(fields, sentence):
    found = problems(request(**fields), now_ms=1_000)
    assert any(sentence in problem for problem in found), found


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens must be from 1 to 2147483647, not 0"),
        ({"min_tokens": -1}, "min_tokens must be from 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens (5) must not exceed max_tokens (4)"),
        *(({"temperature": value}, f"not {value}") for value in (-0.1, 101.0, NAN, INF, -INF)),
        *(
            ({"prompt_logprobs": value}, "prompt_logprobs must be from 0 to 100")
            for value in (-1, 101)
        ),
        *(({"top_p": value}, "top_p must be from 0 to 1") for value in (1.1, -1.0, NAN)),
        *(({"top_k": value}, "top_k must be -1") for value in (-2, 2**31)),
        *(({"min_p": value}, "min_p must be from 0 to 1") for value in (-0.1, 1.5, NAN)),
        *(
            ({"presence_penalty": value}, "presence_penalty must be from -2 to 2")
            for value in (-2.1, 3.0, NAN, INF)
        ),
        *(
            ({"frequency_penalty": value}, "frequency_penalty must be from -2 to 2")
            for value in (-2.1, 3.0, NAN)
        ),
        *(
            ({"repetition_penalty": value}, "repetition_penalty must be from 0.000001 to 100")
            for value in (0.0, 1e-300, 9e-7, -1.0, NAN, INF)
        ),
        *(({"n": value}, "n must be from 1 to 128") for value in (0, -1, 129)),
        *(({"logprobs": value}, "logprobs must be true, false or a count") for value in (-1, 101)),
        *(({"top_logprobs": value}, "top_logprobs must be from 0 to 100") for value in (-1, 101)),
        ({"seed": 2**64}, "seed must fit in 64 bits"),
        ({"stop": ("",)}, "stop[0] must have 1 to 1024 characters, not 0"),
        ({"stop": ("a", "b" * 1025)}, "stop[1] must have 1 to 1024 characters, not 1025"),
        ({"stop": ("a",) * 17}, "stop may have 16 strings, not 17"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds -1"),
        ({"stop_token_ids": (1,) * 1025}, "stop_token_ids may have 1024 ids, not 1025"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias holds -1"),
        ({"logit_bias": {1: 101.0}}, "logit_bias[1] must be from -100 to 100, not 101.0"),
        ({"logit_bias": {1: NAN}}, "logit_bias[1] must be from -100 to 100, not nan"),
        (
            {"logit_bias": dict.fromkeys(range(1025), 0.0)},
            "logit_bias may have 1024 entries, not 1025",
        ),
        (
            {"response_format": ResponseFormat()},
            "exactly one of json_schema, regex, grammar, structural_tag, not none",
        ),
        ({"response_format": ResponseFormat(regex="a", grammar="b")}, "not regex and grammar"),
        ({"response_format": ResponseFormat(regex="")}, "response_format.regex must have 1 to"),
        (
            {"response_format": ResponseFormat(json_schema={"a": "x" * 300_000})},
            "json_schema may have 262144 bytes",
        ),
        ({"response_format": ResponseFormat(json_schema={"a": 2**70})}, "a number beyond 64 bits"),
        (
            {"response_format": ResponseFormat(structural_tag={"a": "x" * 300_000})},
            "structural_tag may have 262144 bytes",
        ),
        *(
            (
                {"response_format": ResponseFormat(json_schema=envelope)},
                "json_schema holds OpenAI's envelope",
            )
            for envelope in ENVELOPES
        ),
    ],
)
def test_each_problem_of_the_parameters_is_reported(fields, sentence):
    found = params_problems(SamplingParams(**fields))
    assert any(sentence in problem for problem in found), found


@pytest.mark.parametrize(
    "field", ["top_k", "n", "max_tokens", "seed", "min_tokens", "top_logprobs"]
)
def test_huge_integers_are_refused_without_raising(field):
    for value in (10**30, -(10**30)):
        values: dict[str, Any] = {field: value}
        assert problems(request(params=SamplingParams(**values)))


def test_a_schema_nested_too_deep_is_refused():
    deep: dict[str, object] = {}
    for _ in range(100):
        deep = {"a": deep}
    assert problems(
        request(params=SamplingParams(response_format=ResponseFormat(json_schema=deep)))
    )
    for _ in range(100_000):
        deep = {"a": [deep]}
    assert problems(
        request(params=SamplingParams(response_format=ResponseFormat(json_schema=deep)))
    )


def test_a_surrogate_in_any_field_is_reported():
    broken = "x\udc80"
    for fields in (
        {"job_id": broken},
        {"model": broken},
        {"prompt": None, "messages": (Message("user", broken),)},
        {"metadata": {broken: ""}},
        {"params": SamplingParams(stop=(broken,))},
        {"params": SamplingParams(response_format=ResponseFormat(grammar=broken))},
        {
            "params": SamplingParams(
                response_format=ResponseFormat(json_schema={"a": [{broken: 1}]})
            )
        },
    ):
        [problem] = problems(request(**fields))
        assert "lone surrogate" in problem


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": 7},
        {"prompt": b"bytes"},
        {"prompt": None, "messages": ({"role": "king", "content": "x"},)},
        {"prompt": None, "prompt_ids": ("a",)},
        {"prompt": None, "prompt_ids": (1.5,)},
        {"params": SamplingParams(temperature="hot")},  # type: ignore[arg-type]
        {"params": SamplingParams(max_tokens=True)},
        {"params": None},
        {"metadata": {"a": 1}},
        {"metadata": {"a": object()}},
        {"priority": "urgent"},
        {"stream": "yes"},
    ],
)
def test_values_of_wrong_types_are_reported(fields):
    [problem] = problems(request(**fields))
    assert "wrong type" in problem or "cannot be sent" in problem


def test_a_payload_beyond_the_limit_is_refused_with_its_size():
    assert problems(request(prompt="x" * (MAX_PAYLOAD_BYTES - 100))) == []
    [problem] = problems(request(prompt="x" * 10_000_000))
    assert "100000" in problem
    assert str(MAX_PAYLOAD_BYTES) in problem


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(JobRequest.__struct_fields__), JSON, max_size=4))
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_validation_of_any_request_never_raises(fields):
    found = problems(request(**fields), now_ms=1)
    assert all(isinstance(sentence, str) and sentence for sentence in found)


@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), JSON, max_size=4))
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_validation_of_any_parameters_never_raises_and_valid_ones_encode(fields):
    job = request(params=SamplingParams(**fields))
    if not problems(job):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=JobRequest).job_id == "job"


def assistant(arguments: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall(FunctionCall("f", arguments)),))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": (Message("user"),)}, "messages[0].content must be a text or a list"),
        ({"messages": (Message("assistant"),)}, "messages[0] has neither content nor tool_calls"),
        *(
            (
                {"messages": (assistant(text),)},
                "messages[0].tool_calls[0].function.arguments must be a JSON object, as text",
            )
            for text in ("", "[]", "{", '{"a": "\\ud800"}', "[" * 100_000)
        ),
        (
            {"messages": (Message("user", "x", reasoning="y"),)},
            "messages[0].reasoning is an assistant's only",
        ),
        (
            {"messages": (Message("user", "x", tool_call_id="y"),)},
            "messages[0].tool_call_id is a tool's only",
        ),
        (
            {"messages": (Message("user", "x"),), "chat_template_kwargs": {"a": 2**70}},
            "chat_template_kwargs holds a number beyond 64 bits",
        ),
        (
            {"messages": (Message("user", "x"),), "chat_template_kwargs": {"a": "x" * 300_000}},
            "chat_template_kwargs may have 262144 bytes",
        ),
        *(
            (
                {"messages": (message,), "continue_final_message": True},
                "continue_final_message needs a final message with content",
            )
            for message in (Message("assistant", None, reasoning="x"), Message("user", ()))
        ),
        *(
            ({"messages": None, "prompt": "x", name: value}, f"{name} needs messages")
            for name, value in (
                ("documents", ({},)),
                ("chat_template_kwargs", {"a": 1}),
                ("continue_final_message", True),
                ("add_generation_prompt", False),
            )
        ),
    ],
)
def test_each_problem_of_a_chat_is_reported(fields, sentence):
    found = problems(request(**({"prompt": None} | fields)))
    assert any(sentence in problem for problem in found), found
