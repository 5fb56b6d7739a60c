"""The producer's side: submit jobs, stream their tokens, fetch results.

Import from here, and from `tokenmill.errors`, `.webhooks`, `.sql`, `.bulk`, `.celery` and
`.testing`; everything below is internal. `Operation` and the IO requests (`Commands`,
`QueryDatabase`, `Receive`, `Sleep`, `Subscribe`) are for operations of your own, which
`Client.perform` runs.
"""

from tokenmill.async_client import AsyncClient
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
from tokenmill.operations.io_requests import (
    ClientOptions,
    Commands,
    Operation,
    QueryDatabase,
    Receive,
    Sleep,
    Subscribe,
)
from tokenmill.operations.json_parts import JsonPart, json_parts, json_parts_async
from tokenmill.operations.queue import DeadJob
from tokenmill.operations.records import JobInfo, QueueDepth
from tokenmill.operations.submit import JobHandle
from tokenmill.transport.connect import Link

__all__ = [
    "AsyncClient", "Client", "ClientClosed", "ClientOptions", "Commands", "ConfigurationError",
    "DeadJob", "IdempotencyConflict", "InvalidRequest", "JobFailed", "JobHandle", "JobInfo",
    "JobNotFound", "JsonPart", "Link", "Operation", "QueryDatabase", "QueueDepth", "QueueFull",
    "QueueRefusal", "QueueUnavailable", "QueueUnserved", "RateLimited", "Receive", "ResultTimeout",
    "Sleep", "Subscribe", "TokenmillError", "UnreadableRecord", "json_parts", "json_parts_async",
]  # fmt: skip
