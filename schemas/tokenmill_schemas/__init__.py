"""Structs that producers, workers and subscribers exchange: msgspec structs, sent as
MessagePack.

Belongs here: what has to mean the same to both sides: messages, keys, limits, checks, tables. Code
that connects to a server belongs elsewhere.
"""

from tokenmill_schemas.chat import FunctionCall, Message, TextPart, Tool, ToolCall, ToolFunction
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import (
    FinishReason,
    ResponseFormat,
    SamplingParams,
    TokenLogprob,
    token_text,
)
from tokenmill_schemas.job import JobRequest, Priority, RetryPolicy
from tokenmill_schemas.result import (
    ChoiceResult,
    GeneratedCall,
    JobError,
    JobResult,
    JobStatus,
    ScoredPrompt,
    ToolCallDelta,
    Usage,
)

__all__ = [
    "ChoiceResult",
    "Chunk",
    "FinishReason",
    "FunctionCall",
    "GeneratedCall",
    "JobError",
    "JobRequest",
    "JobResult",
    "JobStatus",
    "Message",
    "Priority",
    "ResponseFormat",
    "RetryPolicy",
    "SamplingParams",
    "ScoredPrompt",
    "TextPart",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolFunction",
    "Usage",
    "token_text",
]
