"""Answers of chats and completions, read by OpenAI's own published client types."""

import json
from typing import Any

import msgspec
from openai.types import Completion as TheirCompletion
from openai.types.chat import ChatCompletion as TheirChat

from tests.client.bulk.support import result
from tokenmill.openai.answers import answer_of
from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_schemas.openai import CHAT_URL, COMPLETIONS_URL
from tokenmill_schemas.result import ChoiceResult, GeneratedCall, JobResult, ScoredPrompt

JOB = result("batch_abc", 4)
CHOICE = JOB.choices[0]


def body(job: JobResult, url: str = CHAT_URL) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(msgspec.json.encode(answer_of(job, url)))
    return read


def with_choice(**changes: Any) -> JobResult:
    choice: ChoiceResult = msgspec.structs.replace(CHOICE, **changes)
    return msgspec.structs.replace(JOB, choices=(choice,))


def test_a_chat_answer_is_read_by_openai_s_chat_type() -> None:
    received = TheirChat.model_validate(body(JOB), strict=True)
    assert (received.model, received.created) == ("m", 1_700_000_000)
    assert (received.choices[0].message.content, received.choices[0].finish_reason) == (
        "Hi ☁",
        "length",
    )
    assert received.usage is not None
    assert received.usage.total_tokens == 7
    assert received.usage.prompt_tokens_details is not None
    assert received.usage.prompt_tokens_details.cached_tokens == 2
    logprobs = received.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(entry.token, entry.logprob) for entry in logprobs.content] == [
        ("Hi ", -0.5),
        ("☁", -0.25),
    ]
    assert bytes(logprobs.content[1].bytes or ()).decode() == "☁"
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["Hi ", "Ho"]
    assert [top.bytes for top in logprobs.content[1].top_logprobs] == [[226, 152, 129], [226, 152]]


def test_thoughts_are_a_field_of_their_own_in_a_chat_answer() -> None:
    job = with_choice(text="☁", text_ends=(0, 1), reasoning="Hm", reasoning_ends=(2,))
    received = TheirChat.model_validate(body(job), strict=True)
    assert body(job)["choices"][0]["message"]["reasoning_content"] == "Hm"
    assert received.choices[0].message.content == "☁"
    assert received.usage is not None
    assert received.usage.completion_tokens_details is not None
    assert received.usage.completion_tokens_details.reasoning_tokens == 1
    assert received.choices[0].logprobs is not None
    assert [entry.token for entry in received.choices[0].logprobs.content or ()] == ["Hi ", "☁"]


def test_tool_calls_are_read_by_openai_s_chat_type() -> None:
    calls = (
        GeneratedCall("c1", "get", '{"a": 1}'),
        GeneratedCall("c2", "get", '{"a', is_complete=False),
    )
    job = with_choice(text="", finish_reason=FinishReason.TOOL_CALLS, tool_calls=calls)
    received = TheirChat.model_validate(body(job), strict=True)
    assert received.choices[0].finish_reason == "tool_calls"
    assert received.choices[0].message.content is None
    read = received.choices[0].message.tool_calls
    assert read is not None
    assert [call.model_dump() for call in read] == [
        {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
    ]


def test_a_completion_answer_is_read_by_openai_s_completion_type() -> None:
    received = TheirCompletion.model_validate(body(JOB, COMPLETIONS_URL), strict=True)
    assert received.choices[0].text == "Hi ☁"
    assert received.choices[0].logprobs is not None
    assert received.choices[0].logprobs.tokens == ["Hi ", "☁"]
    assert received.choices[0].logprobs.text_offset == [0, 3]


def test_an_echoed_prompts_log_probabilities_come_first() -> None:
    """The form is that of OpenAI's completions; the first token has none."""
    scored = TokenLogprob(-1.5, ((4, -0.5), (6, -1.5)), b"b: ", (b"c", b"b: "))
    prompt = ScoredPrompt((5, 6), (scored,), text_ends=(2, 5))
    job = with_choice(text="A b: Hi ☁", text_ends=(8, 9))
    job = msgspec.structs.replace(job, prompt=prompt)
    received = TheirCompletion.construct(**body(job, COMPLETIONS_URL)).choices[0]
    assert received.text == "A b: Hi ☁"
    assert received.logprobs is not None
    assert received.logprobs.tokens == ["A ", "b: ", "Hi ", "☁"]
    assert received.logprobs.token_logprobs == [None, -1.5, -0.5, -0.25]
    assert received.logprobs.text_offset == [0, 2, 5, 8]
    assert received.logprobs.top_logprobs is not None
    assert received.logprobs.top_logprobs[:2] == [None, {"c": -0.5, "b: ": -1.5}]
