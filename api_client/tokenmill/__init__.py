"""The producer's side: submit jobs, stream their tokens, fetch results."""

from tokenmill.async_client import AsyncClient
from tokenmill.base import ClientOptions
from tokenmill.client import Client
from tokenmill.errors import (  # fmt: skip
    ClientClosed,
    ConfigurationError,
    IdempotencyConflict,
    InvalidRequest,
    JobFailed,
    JobNotFound,
    QueueFull,
    QueueRefusal,
    QueueUnavailable,
    QueueUnserved,
    RateLimited,
    ResultTimeout,
    TokenmillError,
    UnreadableRecord,
)
from tokenmill.operations.job_request import JobHandle
from tokenmill.operations.queue import DeadJob
from tokenmill.operations.records import JobInfo, QueueDepth

__all__ = [
    "AsyncClient", "Client", "ClientClosed", "ClientOptions", "ConfigurationError", "DeadJob", "IdempotencyConflict",
    "InvalidRequest", "JobFailed", "JobHandle", "JobInfo", "JobNotFound", "QueueDepth", "QueueFull", "QueueRefusal",
    "QueueUnavailable", "QueueUnserved", "RateLimited", "ResultTimeout", "TokenmillError", "UnreadableRecord",
]  # fmt: skip
