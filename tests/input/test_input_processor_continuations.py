"""Continuations become the given answers of a request to the engine, behind one prompt."""

import pytest

from tests.publish.support import MODEL, Clock, FakeLog, delivery_of, event, logprobs
from tests.support.tokenizers import byte_level, gemma3, smollm2
from tokenmill_schemas.chat import Message
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.input.served_model import ServedModel
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob
from tokenmill_worker.publish.publisher import Publisher
from tokenmill_worker.text.tokenizer import Tokenizer

LENGTH = FinishReason.LENGTH


def model_of(tokenizer: Tokenizer, length: int = 8192) -> ServedModel:
    return ServedModel(("m",), length, tokenizer.vocab_size, frozenset({2}))


def request(*continuations: str | tuple[int, ...], **fields) -> JobRequest:
    values = {"job_id": "job", "prompt": "The sky is"} | fields
    return JobRequest(continuations=continuations, **values)


async def process(
    job: JobRequest, tokenizer: Tokenizer, length: int = 8192
) -> AdmittedJob | FinishedJob:
    processor = InputProcessor(tokenizer, model_of(tokenizer, length), clock=Clock())
    return processor.process(delivery_of(job))


async def admitted(job: JobRequest, tokenizer: Tokenizer) -> AdmittedJob:
    found = await process(job, tokenizer)
    assert isinstance(found, AdmittedJob), found
    return found


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(smollm2, id="bytes"),
        pytest.param(gemma3, id="sentencepiece", marks=pytest.mark.slow),
    ],
)
async def test_continuations_are_tokenised_together_with_the_prompt(load) -> None:
    tokenizer = load()
    found = await admitted(request(" blue", " dark and cold", "."), tokenizer)
    prompt = tokenizer.encode("The sky is", special=True)
    assert found.generation.prompt.token_ids == prompt
    for given, text in zip(found.generation.given, (" blue", " dark and cold", "."), strict=True):
        assert (*prompt, *given) == tokenizer.encode("The sky is" + text, special=True)
    params = found.generation.params
    assert (params.n, params.wants_logprobs, params.ignore_eos) == (3, True, True)
    assert params.max_tokens == max(map(len, found.generation.given))
    assert len(found.answer.choices) == 3


async def test_continuations_follow_the_rendered_chat() -> None:
    chat = (Message("user", "Is it blue?"),)
    found = await admitted(request("Yes", "No", prompt=None, messages=chat), smollm2())
    rendered = smollm2().template.render(chat)
    assert found.generation.prompt.token_ids == smollm2().encode(rendered)
    assert found.generation.given == (smollm2().encode("Yes"), smollm2().encode("No"))


async def test_continuations_given_as_token_ids_are_kept() -> None:
    job = request((5, 6), (7,), prompt=None, prompt_ids=(1, 2))
    found = await admitted(job, smollm2())
    assert (found.generation.prompt.token_ids, found.generation.given) == ((1, 2), ((5, 6), (7,)))


async def test_continuations_may_ask_for_top_logprobs_and_an_adapter() -> None:
    params = SamplingParams(top_logprobs=3)
    found = await admitted(request("a", params=params), byte_level())
    assert found.generation.params.num_top_logprobs == 3


@pytest.mark.parametrize(
    ("job", "length", "says"),
    [
        (
            request(" blue", "lark", prompt="The sky is sky"), 8192,
            "continuations[1] shares a token with the end of the prompt: begin it where a word or "
            "a space begins, or give token ids",
        ),
        (
            request(" blue" * 30), 24,
            "the prompt and continuations[0] have 33 tokens; the model's length is 24, of which "
            "one is left free",
        ),
        (request((5, 60_000)), 8192, "continuations holds 60000, outside the vocabulary of 49152"),
        (
            request("a", params=SamplingParams(n=2)), 8192,
            "n cannot be given with continuations: they are scored, and nothing is drawn",
        ),
    ],
)  # fmt: skip
async def test_continuations_that_cannot_be_scored_are_refused_in_a_sentence(
    job: JobRequest, length: int, says: str
) -> None:
    found = await process(job, smollm2(), length)
    assert isinstance(found, FinishedJob)
    assert found.result.error is not None
    assert says in found.result.error.message


async def test_scoring_resumed_at_any_chunk_scores_only_missing_tokens() -> None:
    """The engine's events, chunk by chunk, then a second worker from any of them."""
    job = request("ax", "cde", prompt="hi", stream=True)
    first = InputProcessor(byte_level(), MODEL, clock=Clock()).process(delivery_of(job))
    assert isinstance(first, AdmittedJob)
    log = FakeLog()
    publisher = Publisher(log)
    publisher.open(first)
    await publisher.handle([event("a", logprobs=logprobs(-1.0))])
    await publisher.handle([event("cd", choice=1, logprobs=logprobs(-2.0, -3.0))])
    await publisher.handle([event("x", logprobs=logprobs(-4.0)), event(end=LENGTH)])
    report = await publisher.handle(
        [event("e", choice=1, logprobs=logprobs(-5.0)), event(choice=1, end=LENGTH)]
    )
    [finished] = report.finished
    assert finished.result.status is JobStatus.SUCCEEDED
    assert [choice.text for choice in finished.result.choices] == ["ax", "cde"]
    assert [choice.total_logprob for choice in finished.result.choices] == [-5.0, -10.0]
    assert finished.result.usage.completion_tokens == 5
    for num_chunks in range(len(log.chunks["job"])):
        delivery = second_delivery(job, log, num_chunks)
        again = InputProcessor(byte_level(), MODEL, clock=Clock()).process(delivery)
        assert isinstance(again, AdmittedJob)
        reported: dict[int, tuple[int, ...]] = {0: (), 1: ()}
        for chunk in log.chunks["job"][:num_chunks]:
            reported[chunk.choice] += chunk.token_ids
        assert again.generation.resumed == (tuple(reported.values()) if num_chunks else ())
        assert again.generation.given == (tuple(b"ax"), tuple(b"cde"))
        assert again.generation.done == ((0,) if len(reported[0]) == 2 else ())
    ended = InputProcessor(byte_level(), MODEL, clock=Clock()).process(
        second_delivery(job, log, len(log.chunks["job"]))
    )
    assert isinstance(ended, FinishedJob)
    assert ended.result.choices == finished.result.choices


def second_delivery(job: JobRequest, log: FakeLog, num_chunks: int) -> Delivery:
    return delivery_of(job, tuple(log.chunks["job"][:num_chunks]), token=2, attempt=2)
