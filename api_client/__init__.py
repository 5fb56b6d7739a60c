"""The producer's side: submit jobs, stream their tokens, fetch results."""

from api_client.async_client import AsyncClient
from api_client.base import ClientOptions
from api_client.client import Client
from api_client.errors import (
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
)  # fmt: skip
from api_client.queue_programs import DeadJob
from api_client.records import JobInfo, QueueDepth
from api_client.requests import JobHandle

__all__ = [
    "AsyncClient", "Client", "ClientClosed", "ClientOptions", "ConfigurationError", "DeadJob", "IdempotencyConflict",
    "InvalidRequest", "JobFailed", "JobHandle", "JobInfo", "JobNotFound", "QueueDepth", "QueueFull", "QueueRefusal",
    "QueueUnavailable", "QueueUnserved", "RateLimited", "ResultTimeout", "TokenmillError", "UnreadableRecord",
]  # fmt: skip
