"""A job that asks for what its worker's engine lacks ends with one sentence."""

import dataclasses

import msgspec
import pytest

from tests.publish.support import MODEL, Clock, delivery_of
from tests.support.tokenizers import byte_level
from tokenmill_schemas.chat import Message, Tool, ToolFunction
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobError
from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.text.tokenizer import Tokenizer

NOTHING = Capabilities(limits={"temperature": (0.0, 2.0)}, unavailable=("no_repeat_ngram_size",))
EBNF = 'root ::= "a"'
CHAT = {"prompt": None, "messages": (Message("user", "hi"),)}
ASKED = {
    "response_format.json_schema": {"params": {"response_format": ResponseFormat(json_schema={})}},
    "response_format.regex": {"params": {"response_format": ResponseFormat(regex="a+")}},
    "response_format.grammar": {"params": {"response_format": ResponseFormat(grammar=EBNF)}},
    "response_format.structural_tag": {
        "params": {"response_format": ResponseFormat(structural_tag={"type": "structural_tag"})}
    },
    "tools": {**CHAT, "tools": (Tool(ToolFunction("f")),)},
    "thinking_budget": {**CHAT, "params": {"thinking_budget": 5}},
    "continuations": {"continuations": (" a", " b")},
    "prompt_logprobs": {"params": {"prompt_logprobs": 0}},
    "echo with log-probabilities": {"params": {"echo": True, "logprobs": True}},
    "lora": {"params": {"lora": "poet"}},
    "no_repeat_ngram_size": {"params": {"no_repeat_ngram_size": 2}},
}


@pytest.fixture
def ended(monkeypatch):
    """Return the end of a job whose worker's engine can do nothing special."""
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("the prompt was encoded"))
    model = dataclasses.replace(MODEL, capabilities=NOTHING, adapters=frozenset({"poet"}))
    processor = InputProcessor(byte_level(), model, clock=Clock())

    def end_of(*, params=None, **fields):
        fields = {"prompt": "hi", **fields, "params": SamplingParams(**(params or {}))}
        found = processor.process(delivery_of(JobRequest(job_id="job", **fields)))
        assert isinstance(found, FinishedJob)
        return found.result.error

    return end_of


@pytest.mark.parametrize("name", ASKED)
def test_a_job_that_asks_for_a_lacking_ability_ends_before_its_prompt_is_encoded(name, ended):
    sentence = f"{name} is not available on the engine of this queue"
    assert ended(**ASKED[name]) == JobError("invalid_request", sentence)


def test_a_refusal_names_everything_that_the_engine_lacks(ended):
    params = {"response_format": ResponseFormat(regex="a+"), "temperature": 3.0}
    assert ended(params=params) == JobError(
        "invalid_request",
        "response_format.regex is not available on the engine of this queue; "
        "temperature must be between 0 and 2 with the engine of this queue, not 3",
    )


def test_each_ability_that_a_request_can_ask_for_has_a_job_here():
    found = {name.partition(".")[0] for name in ASKED}
    asked = {
        "structured": "response_format", "tool_grammars": "tools", "scores": "continuations",
        "adapters": "lora", "thinking_budget": "thinking_budget",
        "prompt_logprobs": "prompt_logprobs", "unavailable": "no_repeat_ngram_size",
    }  # fmt: skip
    unasked = {"exact_resume", "media", "limits"}
    fields = {field.name for field in msgspec.structs.fields(Capabilities)}
    assert fields - unasked == set(asked)
    assert set(asked.values()) <= found
