"""Good jobs become requests to the engine; bad ones fail with one clear sentence."""

import dataclasses

import msgpack
import pytest

from tests.publish.support import CREATED_MS, MODEL, Clock, delivery_of
from tests.support.tokenizers import byte_level, gemma3, smollm2
from tokenmill_schemas.chat import Message
from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES, encode
from tokenmill_schemas.generation import (
    FinishReason,
    SamplingParams,
)
from tokenmill_schemas.job import JobRequest, Priority
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.input.served_model import ServedModel, seed_of
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob
from tokenmill_worker.text.tokenizer import Tokenizer

SMOLLM2 = ServedModel(
    ("smollm2-135m-instruct", "smollm2"),
    max_model_len=8192,
    vocab_size=49152,
    eos_token_ids=frozenset({2}),
)


@pytest.fixture
def processor():
    return InputProcessor(byte_level(), MODEL, worker_id="w1", clock=Clock())


def raw(payload: bytes, **fields) -> Delivery:
    return Delivery(
        job_id="job", token=3, payload=payload, deliveries=1, crashes=0, outcome="run", log=(),
        created_ms=CREATED_MS, started_ms=CREATED_MS + 200, attempt=1, **fields,
    )  # fmt: skip


def request(**fields) -> JobRequest:
    return JobRequest(**({"job_id": "job", "prompt": "hi"} | fields))


async def refusal(processor: InputProcessor, delivery: Delivery) -> tuple[str, str]:
    outcome = processor.process(delivery)
    assert isinstance(outcome, FinishedJob)
    result = outcome.result
    assert result.status is JobStatus.FAILED
    assert result.job_id == delivery.job_id
    assert outcome.token == delivery.token
    assert (outcome.final_chunk.status, outcome.final_chunk.error) == (result.status, result.error)
    assert result.error is not None
    assert "\n" not in result.error.message
    assert len(result.error.message) < 1000
    encode(result)
    return result.error.code, result.error.message


# ── good jobs ──


async def test_a_chat_becomes_the_tokens_that_the_template_gives():
    chat = (Message("user", "Why is the sky blue?"),)
    params = SamplingParams(max_tokens=64, temperature=0.7, seed=7, stop=("\n",))
    job = JobRequest(
        job_id="job", model="smollm2", messages=chat, params=params, tenant="acme",
        priority=Priority.BULK,
        deadline_ms=CREATED_MS + 9_000,
    )  # fmt: skip
    admitted = InputProcessor(smollm2(), SMOLLM2, clock=Clock()).process(delivery_of(job))
    assert isinstance(admitted, AdmittedJob)
    generation = admitted.generation
    assert generation.prompt.token_ids == smollm2().encode(smollm2().template.render(chat))
    assert (generation.request_id, generation.priority, generation.tenant) == ("job/1", 2, "acme")
    assert generation.cache_salt == "acme"
    assert generation.deadline == (CREATED_MS + 9_000) / 1000
    assert (generation.resumed, generation.done) == ((), ())
    assert (generation.params.seed, generation.params.max_tokens, generation.params.stop) == (
        7,
        64,
        (),
    )
    assert admitted.request == job
    assert not admitted.answer.is_finished


async def test_a_text_prompt_is_tokenised_and_token_ids_are_kept(processor):
    assert (processor.process(delivery_of(request()))).generation.prompt.token_ids == tuple(b"hi")
    ids = processor.process(delivery_of(request(prompt=None, prompt_ids=(5, 6))))
    assert ids.generation.prompt.token_ids == (5, 6)


async def test_a_job_without_a_seed_gets_the_same_seed_at_every_delivery(processor):
    for attempt in (1, 2):
        admitted = processor.process(delivery_of(request(), attempt=attempt))
        assert isinstance(admitted, AdmittedJob)
        assert admitted.generation.params.seed == seed_of("job")
    assert seed_of("job") != seed_of("job2")
    assert 0 <= seed_of("job") < 2**63


async def test_a_job_without_max_tokens_gets_the_default_or_the_rest_of_the_length():
    for default, prompt, expected in ((None, "hi", 4094), (100, "hi", 100), (100, "x" * 4090, 6)):
        model = ServedModel(("tiny",), 4096, MODEL.vocab_size, MODEL.eos_token_ids, default)
        admitted = InputProcessor(byte_level(), model, clock=Clock()).process(
            delivery_of(request(prompt=prompt))
        )
        assert isinstance(admitted, AdmittedJob)
        assert admitted.generation.params.max_tokens == expected


# ── what does not fit ──


async def test_prompt_and_max_tokens_beyond_the_model_s_length_are_refused(processor):
    fits = request(prompt="x" * 96, params=SamplingParams(max_tokens=4000))
    assert isinstance(processor.process(delivery_of(fits)), AdmittedJob)
    code, message = await refusal(
        processor, delivery_of(request(prompt="x" * 97, params=fits.params))
    )
    assert code == "context_length_exceeded"
    assert message == "97 prompt tokens and max_tokens=4000 make 4097; the model's length is 4096"


async def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(processor):
    assert isinstance(processor.process(delivery_of(request(prompt="x" * 4095))), AdmittedJob)
    for prompt in ("x" * 4096, "abc" * 5000):
        code, message = await refusal(processor, delivery_of(request(prompt=prompt)))
        assert code == "context_length_exceeded"
        assert "4096" in message
    code, _ = await refusal(processor, delivery_of(request(prompt=None, prompt_ids=(1,) * 4096)))
    assert code == "context_length_exceeded"


async def test_a_prompt_far_too_long_is_refused_without_being_tokenised():
    class Lazy(Tokenizer):
        def encode(self, text, special=False):
            raise AssertionError("tokenised")

    processor = InputProcessor(Lazy(smollm2()._tokenizer), SMOLLM2, clock=Clock())
    for job in (
        request(prompt="x " * 3_000_000),
        request(prompt=None, messages=(Message("user", "x" * 6_000_000),)),
    ):
        code, message = await refusal(processor, delivery_of(job))
        assert code == "context_length_exceeded"
        assert "8192" in message


async def test_token_ids_outside_the_vocabulary_are_refused(processor):
    beyond = MODEL.vocab_size
    for job in (
        request(prompt=None, prompt_ids=(1, beyond)),
        request(params=SamplingParams(stop_token_ids=(beyond,))),
        request(params=SamplingParams(logit_bias={beyond: 1.0})),
        request(params=SamplingParams(bad_words_ids=((1, beyond),))),
        request(params=SamplingParams(sequence_bias=(((beyond, 1), 1.0),))),
        request(params=SamplingParams(suppress_tokens=(beyond,))),
        request(params=SamplingParams(begin_suppress_tokens=(beyond,))),
        request(params=SamplingParams(forced_bos_token_id=beyond)),
        request(params=SamplingParams(forced_eos_token_id=(1, beyond))),
    ):
        code, message = await refusal(processor, delivery_of(job))
        assert code == "invalid_request"
        assert str(beyond) in message


async def test_a_job_for_an_unknown_model_is_refused_with_the_served_names(processor):
    code, message = await refusal(processor, delivery_of(request(model="gpt-99")))
    assert (code, message) == (
        "model_not_found",
        "model 'gpt-99' is not served here; this queue serves 'tiny'",
    )
    assert isinstance(processor.process(delivery_of(request(model="tiny"))), AdmittedJob)


# ── bad input ──

GOOD = {"job_id": "job", "prompt": "hi"}
UNDECODABLE = {
    "nothing": b"",
    "noise": b"\xc1\xff\x00 not msgpack",
    "json": b'{"job_id": "job", "prompt": "hi"}',
    "cut short": msgpack.packb(GOOD)[:-1],
    "a list": msgpack.packb([1, 2]),
    "no job id": msgpack.packb({"prompt": "hi"}),
    "prompt is a number": msgpack.packb(GOOD | {"prompt": 7}),
    "params is a list": msgpack.packb(GOOD | {"params": []}),
    "temperature is text": msgpack.packb(GOOD | {"params": {"temperature": "hot"}}),
    "max_tokens is a float": msgpack.packb(GOOD | {"params": {"max_tokens": 1.5}}),
    "unknown priority": msgpack.packb(GOOD | {"priority": "urgent"}),
    "unknown role": msgpack.packb(
        {"job_id": "job", "messages": [{"role": "emperor", "content": "x"}]}
    ),
    "metadata is not text": msgpack.packb(GOOD | {"metadata": {"a": 1}}),
    "broken UTF-8": msgpack.packb(GOOD).replace(b"hi", b"\xff\xfe"),
    "a surrogate in UTF-8": msgpack.packb(GOOD | {"prompt": "xyz"}).replace(
        b"xyz", b"\xed\xa0\x80"
    ),
    "10 MB": msgpack.packb(GOOD | {"prompt": "x" * 10_000_000}),
    "nesting bomb": b"\x82\xa6job_id\xa3job\xa1x" + b"\x91" * 4_000_000,
    "nesting bomb in a schema": b"\x81\xa6params\x81\xafresponse_format\x81\xabjson_schema"
    + b"\x81\xa1a" * 2_000_000,
    "claims 4 billion entries": b"\xdf\xff\xff\xff\xff",
    "claims 4 billion characters": b"\x81\xa6prompt\xdb\xff\xff\xff\xff",
}


@pytest.mark.parametrize("case", UNDECODABLE)
async def test_an_undecodable_request_fails_the_job_with_a_sentence(processor, case):
    code, message = await refusal(processor, raw(UNDECODABLE[case]))
    assert code == "invalid_request"
    assert message.startswith("the job request")


async def test_an_oversized_request_is_refused_with_its_size_and_the_limit(processor):
    _, message = await refusal(processor, raw(UNDECODABLE["10 MB"]))
    assert str(MAX_PAYLOAD_BYTES) in message
    assert str(len(UNDECODABLE["10 MB"])) in message


async def test_a_worker_s_size_limit_may_be_lower_than_the_wire_s():
    strict = InputProcessor(byte_level(), MODEL, max_payload_bytes=2_000, clock=Clock())
    payload = encode(request(prompt="x" * 2_000))
    _, message = await refusal(strict, raw(payload))
    assert message == f"the job request has {len(payload)} bytes; the limit is 2000"
    assert isinstance(strict.process(raw(encode(request(prompt="x" * 20)))), AdmittedJob)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": None, "messages": ()}, "messages is empty"),
        (
            {"prompt": None},
            "exactly one of prompt, messages and prompt_ids must be given, not none",
        ),
        ({"prompt_ids": (1,)}, "not prompt and prompt_ids"),
        (
            {"params": SamplingParams(max_tokens=0)},
            "max_tokens must be from 1 to 2147483647, not 0",
        ),
        ({"params": SamplingParams(max_tokens=-5)}, "not -5"),
        ({"params": SamplingParams(max_tokens=10**12)}, "not 1000000000000"),
        (
            {"params": SamplingParams(temperature=-1.0)},
            "temperature must be from 0 to 100, not -1.0",
        ),
        (
            {"params": SamplingParams(temperature=float("nan"))},
            "temperature must be from 0 to 100, not nan",
        ),
        ({"params": SamplingParams(temperature=float("inf"))}, "not inf"),
        ({"params": SamplingParams(n=10_000)}, "n must be from 1 to 128, not 10000"),
        ({"params": SamplingParams(top_p=-0.5)}, "top_p must be from 0 to 1"),
        ({"params": SamplingParams(stop=("",))}, "stop[0] must have 1 to"),
    ],
)
async def test_contradictory_or_empty_fields_are_refused(processor, fields, expected):
    code, message = await refusal(processor, delivery_of(request(**fields)))
    assert code == "invalid_request"
    assert expected in message


async def test_all_problems_of_a_request_are_reported_together(processor):
    bad = request(prompt="", params=SamplingParams(top_k=-7, n=0))
    _, message = await refusal(processor, delivery_of(bad))
    assert all(name in message for name in ("prompt", "top_k", "n must"))


async def test_a_prompt_that_encodes_to_no_token_is_refused(processor):
    code, message = await refusal(
        InputProcessor(Tokenizer(byte_level()._tokenizer, "{# nothing #}"), MODEL, clock=Clock()),
        delivery_of(request(prompt=None, messages=(Message("user", "x"),))),
    )
    assert (code, message) == ("invalid_request", "the prompt is empty: it has no tokens")


@pytest.mark.timeout(600)
async def test_messages_for_a_model_without_a_chat_template_are_refused():
    model = ServedModel(("gemma3-270m",), 2048, 262144, frozenset({1}))
    job = request(prompt=None, messages=(Message("user", "x"),))
    code, message = await refusal(InputProcessor(gemma3(), model, clock=Clock()), delivery_of(job))
    assert (code, message) == (
        "invalid_request",
        "the model has no chat template: send a prompt instead of messages",
    )


async def test_names_of_a_refused_request_are_cut_to_the_record_s_columns(processor):
    """SQL text holds no null character, and its columns have an end."""
    bad = request(tenant="a\0b" * 500, model="m\n", metadata={"k": "v" * 1_000_000, "\0": ""})
    outcome = processor.process(delivery_of(bad))
    assert isinstance(outcome, FinishedJob)
    assert outcome.result.status is JobStatus.FAILED
    assert outcome.result.tenant.startswith("abab")
    assert len(outcome.result.tenant) <= 256
    assert (outcome.result.model, outcome.result.metadata) == ("m", {})
    fine = processor.process(delivery_of(request(prompt="", tenant="acme", metadata={"k": "v"})))
    assert (fine.result.tenant, fine.result.metadata) == ("acme", {"k": "v"})


async def test_an_exception_during_processing_fails_the_job_with_a_sentence():
    class Broken(Tokenizer):
        def encode(self, text, special=False):
            raise MemoryError

    code, message = await refusal(
        InputProcessor(Broken(byte_level()._tokenizer), MODEL, clock=Clock()),
        delivery_of(request()),
    )
    assert (code, message) == (
        "internal_error",
        "the worker could not take this request in: MemoryError",
    )


async def test_a_job_whose_deadline_passed_in_the_queue_expires(processor):
    late = request(deadline_ms=CREATED_MS + 400)
    outcome = processor.process(delivery_of(late))
    assert isinstance(outcome, FinishedJob)
    assert outcome.result.error is not None
    assert (outcome.result.status, outcome.result.error.code) == (
        JobStatus.EXPIRED,
        "deadline_exceeded",
    )
    assert outcome.result.usage.prompt_tokens == 0
    assert (
        outcome.result.finish_reason is None or outcome.result.finish_reason is FinishReason.EXPIRED
    )


async def test_a_deadline_from_before_a_redrive_does_not_count(processor):
    late = delivery_of(request(deadline_ms=CREATED_MS + 400))
    outcome = processor.process(dataclasses.replace(late, is_redriven=True))
    assert isinstance(outcome, AdmittedJob)
    assert outcome.generation.deadline is None
