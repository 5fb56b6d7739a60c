"""A request body becomes a job, or is refused with the name of the wrong parameter."""

from typing import Any

import pytest

from tests.client.bulk.support import chat, completion
from tests.support.pages import GUIDES
from tokenmill.bulk.formats.input_file import BadLine, BatchDefaults, parse, to_request
from tokenmill.openai.parameters import SAMPLING
from tokenmill.openai.request_body import fields_of
from tokenmill_schemas.chat import Message, TextPart
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest, Priority
from tokenmill_schemas.openai import CHAT_URL, COMPLETIONS_URL, RESPONSES_URL


def job_of(line: dict[str, Any], **order: Any) -> JobRequest | BadLine:
    import json

    parsed = parse(3, json.dumps(line).encode())
    return (
        parsed
        if isinstance(parsed, BadLine)
        else to_request(parsed, BatchDefaults("batch_1", **order))
    )


def test_a_chat_becomes_a_bulk_job_without_chunks() -> None:
    job = job_of(
        chat("a", "Hi", temperature=0.5, top_p=0.9, seed=7, stop="x", n=2, presence_penalty=1),
        tenant="acme",
    )
    assert isinstance(job, JobRequest)
    assert (job.job_id, job.batch_id, job.priority, job.stream) == (
        "batch_1-3",
        "batch_1",
        Priority.BULK,
        False,
    )
    assert (job.tenant, job.model, job.messages) == ("acme", "synthetic", (Message("user", "Hi"),))
    params = job.params
    assert (params.temperature, params.top_p, params.seed, params.stop, params.n) == (
        0.5,
        0.9,
        7,
        ("x",),
        2,
    )
    assert (params.max_tokens, params.presence_penalty) == (4, 1.0)
    assert job.metadata["custom_id"] == "a"


def test_each_sampling_parameter_has_a_name_in_a_body() -> None:
    """The others have another form in a body, or none."""
    other = {
        "max_tokens", "n", "logprobs", "top_logprobs", "response_format", "echo",
        "prompt_logprobs", "speculate", "lora",
    }  # fmt: skip
    assert set(SAMPLING) == set(SamplingParams.__struct_fields__) - other
    page = (GUIDES / "bulk.md").read_text(encoding="utf-8")
    assert [name for name in SAMPLING if f"`{name}`" not in page] == []


def test_max_completion_tokens_sets_max_tokens_and_nulls_are_ignored() -> None:
    job = job_of(
        chat("a", max_completion_tokens=9, tools=None, stop=None, user="u", metadata={"k": "v"})
    )
    assert isinstance(job, JobRequest)
    assert job.params.max_tokens == 9


def test_a_completion_without_max_tokens_gets_the_apis_sixteen() -> None:
    assert fields_of(COMPLETIONS_URL, {"model": "m", "prompt": "x"})["max_tokens"] == 16
    assert "max_tokens" not in fields_of(
        CHAT_URL, {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    )


@pytest.mark.parametrize(
    ("prompt", "field"), [("text", "prompt"), (["text"], "prompt"), ([1, 2], "prompt_ids")]
)
def test_a_completion_prompt_may_be_text_one_text_in_a_list_or_token_ids(
    prompt: Any, field: str
) -> None:
    job = job_of(completion("a", prompt, logprobs=3, logit_bias={"5": -1}))
    assert isinstance(job, JobRequest)
    assert getattr(job, field)
    assert (job.params.logprobs, job.params.logit_bias) == (3, {5: -1.0})


@pytest.mark.parametrize("url", [CHAT_URL, "/v1/completions", "/v1/responses"])
def test_token_rules_are_read_from_every_kind_of_body(url: str) -> None:
    rules: dict[str, Any] = {
        "bad_words_ids": [[5, 4]], "sequence_bias": [[[5, 4], 3.5]], "no_repeat_ngram_size": 2,
        "suppress_tokens": [1], "begin_suppress_tokens": [2], "forced_bos_token_id": 3,
        "forced_eos_token_id": 4,
    }  # fmt: skip
    prompts: dict[str, dict[str, Any]] = {
        CHAT_URL: {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
    }
    fields = fields_of(url, {"model": "m", **prompts[url], **rules})
    assert {name: fields[name] for name in rules} == rules


def test_a_completion_may_echo_its_prompt() -> None:
    job = job_of(completion("a", "x", echo=True, logprobs=2))
    silent = job_of(completion("a", "x", echo=False))
    assert isinstance(job, JobRequest)
    assert isinstance(silent, JobRequest)
    assert (job.params.echo, job.params.logprobs) == (True, 2)
    assert not silent.params.echo


def test_message_parts_and_roles_of_a_chat_are_read() -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]
    messages = [{"role": "developer", "content": parts}, {"role": "user", "content": "Hi"}]
    job = job_of(chat("a", messages=messages))
    assert isinstance(job, JobRequest)
    parts_read = (TextPart("Be "), TextPart("brief"))
    assert job.messages == (Message("developer", parts_read), Message("user", "Hi"))


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None, "refusal": "No"},
        {"content": [{"type": "refusal", "refusal": "No"}]},
        {"content": "No"},
    ],
)
def test_a_refusal_in_the_history_becomes_assistant_text(turn: dict[str, Any]) -> None:
    job = job_of(
        chat("a", messages=[{"role": "assistant", **turn}, {"role": "user", "content": "Why?"}])
    )
    assert isinstance(job, JobRequest)
    assert job.messages == (Message("assistant", "No"), Message("user", "Why?"))


def test_parameters_with_neutral_values_are_accepted() -> None:
    assert isinstance(job_of(chat("a", verbosity="medium", reasoning_effort="none")), JobRequest)
    of_vllm: dict[str, Any] = {
        "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False, "use_beam_search": False, "length_penalty": 1.0,
        "early_stopping": False, "return_token_ids": False, "priority": 0, "best_of": 1,
    }  # fmt: skip
    assert isinstance(job_of(chat("a", **of_vllm)), JobRequest)
    assert isinstance(job_of(completion("a", **of_vllm)), JobRequest)
    del of_vllm["best_of"]
    body = {"model": "m", "input": "Hi", **of_vllm}
    line = {"custom_id": "a", "method": "POST", "url": RESPONSES_URL, "body": body}
    assert isinstance(job_of(line), JobRequest)
    for body in ({"best_of": 1}, {"best_of": 2, "n": 2}):
        assert isinstance(job_of(completion("a", **body)), JobRequest)


@pytest.mark.parametrize(
    ("wanted", "read"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ResponseFormat(json_schema={})),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
            ResponseFormat(json_schema={"type": "object"}, strict=False),
        ),
    ],
)
def test_each_response_format_is_read_or_refused(
    wanted: dict[str, Any], read: ResponseFormat | None
) -> None:
    job = job_of(chat("a", response_format=wanted))
    assert isinstance(job, JobRequest)
    assert job.params.response_format == read


def test_reasoning_effort_becomes_a_template_variable() -> None:
    job = job_of(chat("a", reasoning_effort="low", chat_template_kwargs={"a": 1}))
    assert isinstance(job, JobRequest)
    assert job.chat_template_kwargs == {"reasoning_effort": "low", "a": 1}
    refused = job_of(chat("a", reasoning_effort="much"))
    assert isinstance(refused, BadLine)
    assert (refused.param, refused.code) == ("reasoning_effort", "invalid_value")


def test_logprobs_and_top_logprobs_of_a_chat_are_read() -> None:
    job = job_of(chat("a", logprobs=True, top_logprobs=2))
    assert isinstance(job, JobRequest)
    assert (job.params.wants_logprobs, job.params.num_top_logprobs) == (True, 2)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]", "invalid_value"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"foo": 1}, "foo", "unknown_parameter"),
        ({"prompt": "x"}, "prompt", "unknown_parameter"),
        ({"model": ""}, "model", "missing_required_parameter"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": ["x"]}, "messages[0]", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            None,
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0]",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "audio": {"id": "a"}}]},
            "messages[0].audio",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            "messages[0].content",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": []}]}]},
            "messages[0].content[0]",
            None,
        ),
        ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "unsupported_parameter"),
        ({"length_penalty": 0.5}, "length_penalty", "unsupported_parameter"),
        ({"logprobs": 3}, "logprobs", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "invalid_value"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"stop": {"a": 1}}, "stop", "invalid_value"),
        ({"logit_bias": {"dog": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias", "invalid_value"),
        ({"response_format": {"type": "poem"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": []}}, "response_format.type", "invalid_value"),
        ({"response_format": "json"}, "response_format", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"n": "many"}, None, "invalid_value"),
    ],
)
def test_a_refused_chat_body_names_the_parameter_and_the_code(
    body: dict[str, Any], param: str | None, code: str | None
) -> None:
    rejected = job_of(chat("a", **body))
    assert isinstance(rejected, BadLine)
    assert (rejected.status, rejected.param, rejected.custom_id) == (400, param, "a")
    assert code in (None, rejected.code)
    assert rejected.message


@pytest.mark.parametrize(
    "body",
    [
        {"suffix": "x"},
        {"best_of": 3},
        {"prompt": ["a", "b"]},
        {"prompt": 5},
        {"prompt": []},
    ],
)
def test_unsupported_completion_parameters_are_refused(body: dict[str, Any]) -> None:
    rejected = job_of(completion("a", **body))
    assert isinstance(rejected, BadLine)
    assert (rejected.status, rejected.param) == (400, next(iter(body)))


def test_a_body_without_a_model_uses_the_queues_model() -> None:
    job = job_of(chat("a", model="gpt-4o-mini"), any_model=True)
    assert isinstance(job, JobRequest)
    assert job.model == ""
