"""What travels between producers, workers and subscribers: msgspec structs, MessagePack on the wire."""

from schemas.chunk import Chunk
from schemas.generation import FinishReason, ResponseFormat, SamplingParams, TokenLogprob
from schemas.job import JobRequest, Message, Priority, RetryPolicy
from schemas.result import ChoiceResult, JobError, JobResult, JobStatus, Usage

__all__ = [
    "ChoiceResult",
    "Chunk",
    "FinishReason",
    "JobError",
    "JobRequest",
    "JobResult",
    "JobStatus",
    "Message",
    "Priority",
    "ResponseFormat",
    "RetryPolicy",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
]
