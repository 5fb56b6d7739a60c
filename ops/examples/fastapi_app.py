"""A web backend with a login of its own, to copy: prompts in, tokens out as server-sent events,
cancel, history and usage.

    python -m ops.examples.fastapi_app        # http://127.0.0.1:8000, beside `tokenmill dev`

It needs FastAPI, uvicorn and tokenmill with the extra `sql`, and nothing of the worker. The id of
an event is its chunk's position, so a browser that reconnects (Last-Event-ID) resumes where it was,
on any of your servers. `log_in` and `current_user` identify the user: put your own login there.
Each user is a tenant of the queue: users share it fairly and cannot see each other's jobs. What
needs no login of its own needs no backend: `tokenmill gateway` has OpenAI's API, keys and a page.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import uvicorn
from fastapi import Cookie, Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from msgspec import to_builtins
from pydantic import BaseModel, Field

from tokenmill import (
    AsyncClient,
    ConfigurationError,
    JobNotFound,
    QueueUnavailable,
    RateLimited,
    ResultTimeout,
    TokenmillError,
)
from tokenmill.openai.errors import of_exception
from tokenmill.sql import SqlResults
from tokenmill_schemas import Chunk

log = logging.getLogger("uvicorn.error")
TITLE_CHARS = 200
MONTH_S = 30 * 24 * 3600
# seconds without a chunk after which the queue is checked; seconds between retries
SILENCE_S, RETRY_S = (3.0, 1.0)
AWAY = "The service is away."


@dataclass(frozen=True, slots=True)
class Backend:
    """Clients that the handlers use; both may be shared by concurrent requests."""

    jobs: AsyncClient
    results: SqlResults


class PromptBody(BaseModel):
    prompt: str = Field(min_length=1, max_length=20_000)
    max_tokens: int = Field(200, ge=1, le=4_000)
    temperature: float = Field(0.7, ge=0, le=2)


def backend(request: Request) -> Backend:
    held: Backend = request.app.state.backend
    return held


def current_user(visitor: Annotated[str | None, Cookie()] = None) -> str:
    """Return the tenant of the visitor's jobs: a hash of the cookie, which itself stays secret."""
    if visitor is None:
        raise HTTPException(
            401, "log in first (POST /api/login): it sets the cookie that says who you are"
        )
    return "web-" + hashlib.sha256(visitor.encode()).hexdigest()[:16]


Parts = Annotated[Backend, Depends(backend)]
User = Annotated[str, Depends(current_user)]


async def own_job(job_id: str, parts: Parts, user: User) -> str:
    """Return the id if the job is this user's; another user's job counts as not found."""
    if (await parts.jobs.status(job_id)).tenant != user:
        raise JobNotFound(job_id)
    return job_id


OwnJob = Annotated[str, Depends(own_job)]


def seen_position(parts: Parts, last_event_id: Annotated[str, Header()] = "0") -> str:
    """Return the browser's position; an invalid one is rejected before the response begins."""
    try:
        parts.jobs.stream("", starting_after=last_event_id)  # checks it at once; sends nothing
    except ConfigurationError as error:
        raise HTTPException(422, str(error)) from error
    return last_event_id


Position = Annotated[str, Depends(seen_position)]


def add_job_routes(app: FastAPI) -> None:
    @app.post("/api/jobs", status_code=201)
    async def submit(
        wanted: PromptBody,
        parts: Parts,
        user: User,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> dict[str, Any]:
        """Submit a job.

        Requests with the same Idempotency-Key (a retry, a double click) give one job.
        """
        job = await parts.jobs.submit(
            messages=[{"role": "user", "content": wanted.prompt}],
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            priority="interactive",
            tenant=user,
            idempotency_key=idempotency_key,
            metadata={"title": wanted.prompt[:TITLE_CHARS]},
        )
        return {"job_id": job, "is_new": job.is_new}

    @app.get("/api/jobs/{job_id}")
    async def status(job: OwnJob, parts: Parts) -> dict[str, Any]:
        """Return the job's status, and its title from the metadata once it is over."""
        info = await parts.jobs.status(job)
        metadata = (await parts.jobs.result(job)).metadata if info.status.is_final else {}
        return {**to_builtins(info), "title": metadata.get("title")}

    @app.post("/api/jobs/{job_id}/cancel")
    async def cancel(job: OwnJob, parts: Parts) -> dict[str, str]:
        return {"outcome": await parts.jobs.cancel(job)}

    @app.get("/api/jobs/{job_id}/events", response_class=EventSourceResponse)
    async def events(
        job: OwnJob, parts: Parts, position: Position
    ) -> AsyncIterator[ServerSentEvent]:
        """Stream the answer as events, and resume by itself when the queue is reachable again.

        A browser that lost the connection reconnects with its last event id.
        """
        is_over = False
        while not is_over:
            try:
                stream = parts.jobs.stream(job, starting_after=position, timeout=SILENCE_S)
                async with contextlib.aclosing(stream):
                    async for chunk in stream:
                        position, is_over = chunk.position, chunk.is_last
                        yield as_event(chunk)
            except ResultTimeout:  # nothing new yet: the queue is reachable, or the next try fails
                yield ServerSentEvent(event="notice", data="")
            except (QueueUnavailable, ConfigurationError):
                yield ServerSentEvent(
                    event="notice", data=f"{AWAY} Your answer goes on as soon as it is back."
                )
                await asyncio.sleep(RETRY_S)


def as_event(chunk: Chunk) -> ServerSentEvent:
    if not chunk.is_last:
        data = {"text": chunk.text, "tokens": len(chunk.token_ids)}
        return ServerSentEvent(event="token", id=chunk.position, data=data, retry=1_000)
    end = {
        "text": chunk.text, "status": chunk.status, "finish_reason": chunk.finish_reason,
        "usage": to_builtins(chunk.usage), "error": to_builtins(chunk.error),
    }  # fmt: skip
    return ServerSentEvent(event="end", id=chunk.position, data=end)


def add_record_routes(app: FastAPI) -> None:
    """Add handlers that FastAPI runs in threads: a slow database blocks no other request."""

    @app.get("/api/history")
    def history(
        parts: Parts, user: User, offset: int = 0, limit: Annotated[int, Field(ge=1, le=100)] = 20
    ) -> Any:
        return to_builtins(parts.results.jobs(tenant=user, limit=limit, offset=offset))

    @app.get("/api/usage")
    def usage(parts: Parts, user: User) -> Sequence[dict[str, Any]]:
        days = parts.results.usage(by=("day",), tenant=user)
        return [to_builtins(day) for day in days[-14:]]


def add_login(app: FastAPI) -> None:
    @app.post("/api/login", status_code=204)
    def log_in(response: Response, visitor: Annotated[str | None, Cookie()] = None) -> None:
        """Make a visitor a user. A real login checks a password here, or asks your provider."""
        if visitor is None:
            response.set_cookie(
                "visitor", secrets.token_urlsafe(24), max_age=MONTH_S, httponly=True, samesite="lax"
            )


async def explain(_: Request, error: TokenmillError) -> JSONResponse:
    """Answer a client error with its HTTP status. Errors for the operator are also logged."""
    status = of_exception(error).status
    if status == 503:
        log.error("the queue or the database cannot be used: %s", error)
        return JSONResponse({"detail": f"{AWAY} Try again in a moment."}, status)
    wait = (
        {"Retry-After": str(int(error.retry_after) + 1)} if isinstance(error, RateLimited) else {}
    )
    return JSONResponse({"detail": str(error)}, status, wait)


def create_app(redis_url: str, queue: str, database_url: str) -> FastAPI:
    @contextlib.asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[None]:
        results = SqlResults(database_url)
        async with AsyncClient(redis_url, queue=queue, database=database_url) as client:
            app.state.backend = Backend(client, results)
            yield
        results.close()

    app = FastAPI(title="tokenmill example", lifespan=connected)
    app.exception_handler(TokenmillError)(explain)
    add_job_routes(app)
    add_record_routes(app)
    add_login(app)
    return app


app = create_app(
    os.environ.get("TOKENMILL_REDIS_URL", "redis://localhost:6379/0"),
    os.environ.get("TOKENMILL_QUEUE", "smollm2-135m-instruct"),
    os.environ.get("TOKENMILL_DATABASE_URL", "sqlite:///tokenmill.db"),
)

if __name__ == "__main__":
    # Open streams would delay a stop for ever; the browsers reconnect to the next server.
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=3)
