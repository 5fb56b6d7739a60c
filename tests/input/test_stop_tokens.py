"""The tokens at which the engine ends an answer: the request's, the special ones among its stop
strings, and the tokenizer's end of turn.
"""

import dataclasses
from typing import Any

import pytest

from tests.publish.support import Clock, delivery_of
from tests.support.tokenizers import smollm2
from tokenmill_schemas.chat import Message
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.input.served_model import ServedModel
from tokenmill_worker.jobs import AdmittedJob, FinishedJob

(END_OF_TEXT,) = smollm2().encode("<|endoftext|>")
(END_OF_TURN,) = smollm2().encode("<|im_end|>")
(START_OF_TURN,) = smollm2().encode("<|im_start|>")
FORGETFUL = ServedModel(  # its files name the end of a text alone
    ("smollm2",),
    max_model_len=8192,
    vocab_size=smollm2().vocab_size,
    eos_token_ids=frozenset({END_OF_TEXT}),
    tokenizer_eos=smollm2().eos_token_ids,
    special_tokens=smollm2().special_tokens,
)


async def process(
    model: ServedModel = FORGETFUL, log: tuple[Chunk, ...] = (), **params: Any
) -> AdmittedJob | FinishedJob:
    request = JobRequest(
        job_id="job", messages=(Message("user", "Hi"),), params=SamplingParams(**params)
    )
    return InputProcessor(smollm2(), model, clock=Clock()).process(delivery_of(request, log))


async def stops(model: ServedModel = FORGETFUL, **params: Any) -> tuple[int, ...]:
    outcome = await process(model, **params)
    assert isinstance(outcome, AdmittedJob)
    return outcome.generation.params.stop_token_ids


async def test_the_tokenizer_s_end_of_turn_stops_an_answer_if_the_model_s_files_omit_it() -> None:
    assert smollm2().eos_token_ids == {END_OF_TURN}
    assert await stops() == (END_OF_TURN,)
    assert await stops(stop_token_ids=(7,)) == (END_OF_TURN, 7)
    assert await stops(ignore_eos=True) == ()


async def test_no_stop_token_is_added_if_the_model_s_files_name_the_end_of_turn() -> None:
    known = dataclasses.replace(FORGETFUL, eos_token_ids=frozenset({END_OF_TEXT, END_OF_TURN}))
    assert await stops(known) == ()


async def test_a_stop_string_that_is_a_special_token_becomes_a_stop_token() -> None:
    assert await stops(ignore_eos=True, stop=("<|im_start|>", "x")) == (START_OF_TURN,)


async def test_a_stop_token_outside_the_model_s_vocabulary_is_left_out() -> None:
    small = dataclasses.replace(FORGETFUL, vocab_size=1)
    assert small.stop_token_ids(SamplingParams(stop=("<|im_start|>",))) == ()


@pytest.mark.parametrize(
    ("params", "last"),
    [({}, END_OF_TURN), ({"stop": ("<|im_start|>",), "ignore_eos": True}, START_OF_TURN)],
)
async def test_a_log_that_ends_with_a_stop_token_finishes_the_job(
    params: dict[str, Any], last: int
) -> None:
    ids = (*smollm2().encode("Hello"), last)
    outcome = await process(log=(Chunk(job_id="job", index=0, token_ids=ids),), **params)
    assert isinstance(outcome, FinishedJob)
    assert outcome.result.finish_reason is FinishReason.STOP
    assert outcome.result.text == "Hello"
