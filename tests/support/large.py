"""A result above the size limit of requests, as a worker writes it."""

from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES, encode
from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus, Usage

NUM_TOKENS = 6_500
DAMAGED = b"\xc1 never used in MessagePack"


def large_result(job_id: str, **fields: object) -> JobResult:
    """6,500 tokens with top_logprobs=100: 8.57 MB."""
    logprob = TokenLogprob(
        -1.234567, tuple((40_000 + rank, -1.0 - rank / 7) for rank in range(100))
    )
    choice = ChoiceResult(
        text="a" * NUM_TOKENS,
        token_ids=(1,) * NUM_TOKENS,
        text_ends=tuple(range(1, NUM_TOKENS + 1)),
        finish_reason=FinishReason.LENGTH,
        logprobs=(logprob,) * NUM_TOKENS,
    )
    usage = Usage(prompt_tokens=3, completion_tokens=NUM_TOKENS)
    values = {
        "status": JobStatus.SUCCEEDED,
        "choices": (choice,),
        "usage": usage,
        "finished_ms": 1_795_000_000_090,
    }
    result = JobResult(job_id=job_id, **{**values, **fields})  # type: ignore[arg-type]
    assert len(encode(result)) > MAX_PAYLOAD_BYTES
    return result
