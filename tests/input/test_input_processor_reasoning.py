"""A chat's answer has its thoughts apart; the engine learns where they end if anything depends on
it.
"""

import pytest

from tests.publish.support import Clock, delivery_of
from tests.support.tokenizers import byte_level, thinking
from tokenmill_schemas.chat import Message
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.contract.requests import Thoughts
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.input.served_model import ServedModel
from tokenmill_worker.jobs import AdmittedJob, FinishedJob

MODEL = ServedModel(
    ("tiny",),
    max_model_len=4096,
    vocab_size=thinking().vocab_size,
    eos_token_ids=thinking().eos_token_ids,
)
HI = (Message("user", "Hi"),)
START, END = thinking().encode("<think></think>")
DATE = ResponseFormat(regex="[0-9]+")


def processor_of(tokenizer=thinking) -> InputProcessor:
    return InputProcessor(
        tokenizer(), MODEL, clock=Clock(), reasoning=tokenizer().reasoning_format("auto")
    )


async def admitted(**fields) -> AdmittedJob:
    request = JobRequest(**({"job_id": "job", "messages": HI} | fields))
    outcome = processor_of().process(delivery_of(request))
    assert isinstance(outcome, AdmittedJob)
    return outcome


@pytest.mark.parametrize(
    ("params", "kwargs", "expected"),
    [
        ({}, {}, None),
        ({"thinking_budget": 9}, {}, Thoughts(end=(END,), closing=(END,), start=START, budget=9)),
        ({"response_format": DATE}, {}, Thoughts(end=(END,), closing=(END,), start=START)),
        (
            {"response_format": DATE},
            {"enable_thinking": True},
            Thoughts(end=(END,), closing=(END,), is_open=True),
        ),
        ({"response_format": DATE}, {"enable_thinking": False}, None),
    ],
)
async def test_the_engine_gets_the_thought_tokens_only_if_a_parameter_depends_on_them(
    params, kwargs, expected
):
    job = await admitted(params=SamplingParams(**params), chat_template_kwargs=kwargs)
    assert job.generation.thoughts == expected


async def test_a_prompt_has_no_thoughts():
    job = await admitted(messages=None, prompt="Hi")
    assert job.answer.choices[0].stream.is_plain


@pytest.mark.parametrize("fields", [{"messages": None, "prompt": "Hi"}, {"messages": HI}])
async def test_a_thinking_budget_for_a_model_without_thoughts_is_refused(fields):
    request = JobRequest(job_id="job", params=SamplingParams(thinking_budget=1), **fields)
    tokenizer = byte_level if request.messages else thinking
    outcome = processor_of(tokenizer).process(delivery_of(request))
    assert isinstance(outcome, FinishedJob)
    assert outcome.result.error is not None
    assert outcome.result.error.message == (
        "thinking_budget needs messages, and a model whose thoughts the worker recognises"
    )


async def test_a_log_that_ends_within_thoughts_continues_within_thoughts():
    ids = thinking().encode("<think>ab")
    log = Chunk(job_id="job", index=0, token_ids=ids, reasoning="ab")
    request = JobRequest(job_id="job", messages=HI)
    outcome = processor_of().process(delivery_of(request, (log,)))
    assert isinstance(outcome, AdmittedJob)
    outcome.answer.push(0, thinking().encode("c</think>Yes"))
    (result,) = outcome.answer.results()
    assert (result.reasoning, result.text) == ("abc", "Yes")
