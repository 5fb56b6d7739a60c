"""Answers and chunks for the tests of stream positions."""

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus

JOB = "j"


def words(start: int, end: int) -> str:
    return "".join(f"<{i}>" for i in range(start, end))


def tokens_and_text(chunks: list[Chunk]) -> tuple[list[int], str]:
    return [token for chunk in chunks for token in chunk.token_ids], "".join(
        chunk.text for chunk in chunks
    )


def answer_of_several(lengths: list[int]) -> JobResult:
    """Make a result with token ids 100 × choice + position.

    Each choice held back a "!" to its end.
    """
    choices = tuple(
        ChoiceResult(
            index=i,
            text=words(100 * i, 100 * i + length) + "!",
            token_ids=tuple(range(100 * i, 100 * i + length)),
            text_ends=tuple(len(words(100 * i, 100 * i + place + 1)) for place in range(length)),
            finish_reason=FinishReason.STOP,
        )
        for i, length in enumerate(lengths)
    )
    return JobResult(job_id=JOB, status=JobStatus.SUCCEEDED, choices=choices)
