"""Structs that producers, workers and subscribers exchange: msgspec structs, sent as
MessagePack.
"""

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
