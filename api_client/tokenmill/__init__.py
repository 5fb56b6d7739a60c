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
from tokenmill.queue_programs import DeadJob
from tokenmill.records import JobInfo, QueueDepth
from tokenmill.requests import JobHandle

__all__ = [
    "AsyncClient", "Client", "ClientClosed", "ClientOptions", "ConfigurationError", "DeadJob", "IdempotencyConflict",
    "InvalidRequest", "JobFailed", "JobHandle", "JobInfo", "JobNotFound", "QueueDepth", "QueueFull", "QueueRefusal",
    "QueueUnavailable", "QueueUnserved", "RateLimited", "ResultTimeout", "TokenmillError", "UnreadableRecord",
]  # fmt: skip
