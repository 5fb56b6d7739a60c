"""A stream's chunks give the same pieces and log-probabilities as the result of the job."""

from collections.abc import Iterable

import msgspec
import pytest

from tests.client.bulk.support import result
from tokenmill.openai.logprobs import chat_logprobs, pieces, text_logprobs
from tokenmill.operations.stream_position import StreamPosition
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.openai import TokenLogprobs
from tokenmill_schemas.result import ChoiceResult, JobResult

JOB = result("batch_abc", 4)
PLAIN = JOB.choices[0]
THINKING = msgspec.structs.replace(
    PLAIN, text="☁", text_ends=(0, 1), reasoning="Hm", reasoning_ends=(2,)
)


def chunks_of(choice: ChoiceResult, tokens_each: int) -> list[Chunk]:
    """Return the chunks of a stream: those of a finished job, or one with all tokens."""
    job: JobResult = msgspec.structs.replace(JOB, choices=(choice,))
    if tokens_each == 1:
        return list(StreamPosition(JOB.job_id).accept_result(job))
    names = ("token_ids", "text", "text_ends", "reasoning", "reasoning_ends", "logprobs")
    parts = {name: getattr(choice, name) for name in names}
    return [Chunk(job_id=JOB.job_id, index=0, **parts)]


def joined(chunks: Iterable[Chunk]) -> list[TokenLogprobs]:
    found = (chat_logprobs(chunk) for chunk in chunks)
    return [entry for logprobs in found if logprobs for entry in logprobs.content]


@pytest.mark.parametrize("tokens_each", [1, 2])
@pytest.mark.parametrize("choice", [PLAIN, THINKING], ids=["text", "thoughts and text"])
def test_a_streams_pieces_are_those_of_the_result(choice: ChoiceResult, tokens_each: int) -> None:
    chunks = chunks_of(choice, tokens_each)
    assert [text for chunk in chunks for text in pieces(chunk)] == pieces(choice)
    known = chat_logprobs(choice)
    assert known is not None
    assert joined(chunks) == known.content
    tokens = [text_logprobs(chunk, None) for chunk in chunks]
    assert [name for found in tokens if found for name in found.tokens] == pieces(choice)
