"""A model's sampling defaults hold where a request names none, and an answer keeps those it began
with.
"""

import dataclasses
from typing import Any

import msgspec

from tests.input.test_input_processor import request
from tests.input.test_input_processor_log import LENGTH, tokens
from tests.publish.support import MODEL, Clock, FakeLog, admit, delivery_of, event
from tests.support.tokenizers import byte_level
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import ResponseFormat, SamplingNumbers, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import AdmittedJob
from tokenmill_worker.publish.publisher import Publisher

QWEN = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, max_tokens=50)


def with_defaults(
    defaults: SamplingParams = QWEN, limit: int | None = None, length: int = 4096
) -> InputProcessor:
    model = dataclasses.replace(
        MODEL, sampling_defaults=defaults, default_max_tokens=limit, max_model_len=length
    )
    return InputProcessor(byte_level(), model, clock=Clock())


async def drawn_with(processor: InputProcessor, **params: Any) -> SamplingParams:
    admitted = processor.process(delivery_of(request(params=SamplingParams(**params))))
    assert isinstance(admitted, AdmittedJob)
    drawn = admitted.answer.params
    assert msgspec.structs.replace(drawn, seed=admitted.generation.params.seed) == (
        admitted.generation.params
    )
    return drawn


async def test_the_model_s_defaults_apply_to_parameters_that_a_request_does_not_set():
    params = await drawn_with(with_defaults())
    assert params == SamplingParams(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.0, repetition_penalty=1.05, max_tokens=50,
        logprobs_mode="raw_logprobs",
    )  # fmt: skip


async def test_parameters_set_to_neutral_values_override_the_model_s_defaults():
    named = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 60, "seed": 3, "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    assert await drawn_with(with_defaults(), **named) == SamplingParams(**named)


async def test_a_model_without_defaults_gets_neutral_parameters():
    params = await drawn_with(with_defaults(SamplingParams()))
    assert params.numbers == SamplingNumbers()
    assert params.max_tokens == 4094


async def test_the_max_tokens_setting_overrides_the_model_s_default():
    assert (await drawn_with(with_defaults(limit=70))).max_tokens == 70
    assert (await drawn_with(with_defaults(length=40))).max_tokens == 38
    assert (await drawn_with(with_defaults(), min_tokens=55)).max_tokens == 55


async def test_texts_of_the_request_are_not_repeated_in_the_log():
    params = SamplingParams(
        stop=("secret",), logit_bias={5: 1.0}, response_format=ResponseFormat(regex="a+")
    )
    admitted = with_defaults().process(delivery_of(request(params=params)))
    assert isinstance(admitted, AdmittedJob)
    kept = admitted.answer.params
    assert (kept.stop, kept.logit_bias, kept.response_format) == ((), {}, None)
    assert admitted.generation.params.logit_bias == {5: 1.0}


# ── the parameters of an answer that has begun ──


async def continued(log: tuple[Chunk, ...], **params):
    """Resume on a worker whose model has other defaults than the first worker's."""
    model = dataclasses.replace(
        MODEL, sampling_defaults=SamplingParams(temperature=0.1, top_k=3, max_tokens=20)
    )
    request = JobRequest(job_id="job", prompt="hi", params=SamplingParams(**params))
    admitted = InputProcessor(byte_level(), model, clock=Clock()).process(
        delivery_of(request, log, attempt=2, token=2)
    )
    assert isinstance(admitted, AdmittedJob)
    drawn = admitted.answer.params
    assert msgspec.structs.replace(drawn, seed=admitted.generation.params.seed) == (
        admitted.generation.params
    )
    return drawn


async def test_a_continued_answer_keeps_its_first_worker_s_parameters():
    first = SamplingParams(
        temperature=0.9, top_p=0.8, top_k=0, min_p=0.0, repetition_penalty=1.2, max_tokens=9,
        seed=5,
        logprobs_mode="raw_logprobs",
    )  # fmt: skip
    log = (msgspec.structs.replace(tokens("a"), params=first), tokens("b", 1))
    assert await continued(log, seed=5) == first
    named = await continued(log, seed=5, temperature=0.5, max_tokens=7)
    assert named == msgspec.structs.replace(first, temperature=0.5, max_tokens=7)


async def test_an_answer_begun_by_an_older_worker_gets_no_model_defaults():
    params = await continued((tokens("a"), tokens("b", 1)))
    assert params.numbers == SamplingNumbers()
    assert params.max_tokens == 4094


async def test_an_answer_with_an_empty_log_gets_this_worker_s_defaults():
    params = await continued(())
    assert (params.temperature, params.top_k, params.max_tokens) == (0.1, 3, 20)


async def test_log_and_result_contain_the_sampling_parameters():
    log = FakeLog()
    publisher = Publisher(log, clock=Clock())
    job = await admit("job", n=2, seed=3, max_tokens=2, temperature=0.5)
    publisher.open(job)
    for choice in (0, 1):
        await publisher.handle([event("a", "job", choice=choice)])
    report = await publisher.handle(
        [event("b", "job", choice=choice, end=LENGTH) for choice in (0, 1)]
    )
    (finished,) = report.finished
    wanted = SamplingParams(
        temperature=0.5, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=2,
        seed=3,
        n=2, logprobs_mode="raw_logprobs",
    )  # fmt: skip
    assert finished.result.params == wanted
    assert [chunk.params for chunk in log.chunks["job"]] == [wanted, None, None, None]
