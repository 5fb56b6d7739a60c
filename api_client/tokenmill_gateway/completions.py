"""`POST /v1/completions`, of one prompt or of several, which are a job each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from tokenmill.openai.answers import answer_of, usage_of
from tokenmill.openai.request_body import fields_of
from tokenmill_gateway.answers import result_of
from tokenmill_gateway.bodies import flag, json_object
from tokenmill_gateway.chat import CompletionEvents, completion, stream_options
from tokenmill_gateway.events import DONE, data_event
from tokenmill_gateway.queues import created_at
from tokenmill_gateway.refusals import HttpRefusal, json_response
from tokenmill_gateway.server import Server
from tokenmill_gateway.sse import Chunks, EventStream
from tokenmill_gateway.submission import Submitted, priority_of, submit_all
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.openai import COMPLETIONS_URL, Completion, CompletionChoice
from tokenmill_schemas.result import JobStatus, Usage

MOST_PROMPTS: Final = 128
_GOOD: Final = (None, JobStatus.SUCCEEDED, JobStatus.CANCELLED)


async def create(server: Server, request: Request) -> ASGIApp:
    key = await server.writer_of(request)
    body = await json_object(request)
    prompts = _prompts(body.get("prompt"))
    if len(prompts) < 2:
        if prompts:
            body["prompt"] = prompts[0]
        return await completion(server, request, key, COMPLETIONS_URL, body)
    is_stream = flag(body, "stream")
    options = stream_options(body, is_stream)
    priority = priority_of(body.pop("service_tier", None), key)
    asked = [fields_of(COMPLETIONS_URL, {**body, "prompt": prompt}) for prompt in prompts]
    jobs = await submit_all(request, server.queues, key, asked, priority=priority, stream=is_stream)
    shown_id = f"cmpl-{jobs[0].job}"
    headers = jobs[0].headers
    if not is_stream:
        answer = await _whole(request, jobs, shown_id, server.answer_s)
        return json_response(answer, headers=headers)
    n = body.get("n") or 1
    events = _JoinedEvents(jobs, shown_id, n, has_usage=options.get("include_usage", False))
    chunks: Any = _JoinedChunks(jobs, n)

    async def on_gone() -> None:
        server.metrics.hung_up.inc()
        await _leave(jobs)

    return EventStream(request, server.streams, chunks, (), events.add, on_gone, headers)


def _prompts(given: Any) -> Sequence[Any]:
    """Return the prompts of a list of several, be they texts or token ids; else none. Raises
    HttpRefusal.
    """
    if not isinstance(given, list) or not given or isinstance(given[0], int):
        return ()
    if len(given) > MOST_PROMPTS:
        words = f"a completion may have {MOST_PROMPTS} prompts, not {len(given)}"
        raise HttpRefusal.of(400, "invalid_value", words, "prompt")
    return given


async def _whole(
    request: Request, jobs: Sequence[Submitted], shown_id: str, limit_s: float
) -> Completion:
    """Return the joined answer. The other jobs are cancelled when one has no answer."""
    waiting = [asyncio.ensure_future(result_of(request, one, shown_id, limit_s)) for one in jobs]
    try:
        results = await asyncio.gather(*waiting)
    except BaseException:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await _leave(jobs)
        raise
    choices: list[CompletionChoice] = []
    used = Usage()
    for result in results:
        answer = answer_of(result, COMPLETIONS_URL)
        assert isinstance(answer, Completion)
        for choice in answer.choices:
            choices.append(msgspec.structs.replace(choice, index=len(choices)))
        used = _sum(used, result.usage)
    return Completion(
        id=shown_id,
        created=created_at(jobs[0].job),
        model=jobs[0].model,
        choices=choices,
        usage=usage_of(used),
    )


async def _leave(jobs: Sequence[Submitted]) -> None:
    for one in jobs:
        if one.leaves_with_client:
            await one.client.cancel(one.job)


def _sum(one: Usage, other: Usage) -> Usage:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
    sums = {name: getattr(one, name) + getattr(other, name) for name in names}
    return msgspec.structs.replace(one, **sums)


class _JoinedChunks:
    """The chunks of several jobs as they come, with choices numbered through."""

    def __init__(self, jobs: Sequence[Submitted], n: int) -> None:
        self._jobs = jobs
        self._n = n

    async def all(self) -> AsyncGenerator[Sequence[Chunk], None]:
        """Yield batches of chunks, those of a job in order, until all have ended or one failed."""
        coming: asyncio.Queue[Any] = asyncio.Queue(64)
        tasks = [
            asyncio.ensure_future(self._read(number, one, coming))
            for number, one in enumerate(self._jobs)
        ]
        try:
            left = len(tasks)
            while left:
                batch = await coming.get()
                if isinstance(batch, Exception):
                    raise batch
                left -= sum(chunk.is_last for chunk in batch)
                yield batch
                if any(chunk.status not in _GOOD for chunk in batch):
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, number: int, one: Submitted, coming: asyncio.Queue[Any]) -> None:
        first = number * self._n
        try:
            async with aclosing(Chunks(one.client, one.job).all()) as batches:
                async for batch in batches:
                    await coming.put(
                        [
                            msgspec.structs.replace(each, choice=each.choice + first)
                            for each in batch
                        ]
                    )
        except Exception as error:
            await coming.put(error)


class _JoinedEvents:
    """The events of several completions in one stream."""

    def __init__(
        self, jobs: Sequence[Submitted], shown_id: str, n: int, *, has_usage: bool
    ) -> None:
        self._events = CompletionEvents(jobs[0], shown_id, COMPLETIONS_URL, has_usage=has_usage)
        self._has_usage = has_usage
        self._left = len(jobs)
        self._used = Usage()

    def add(self, chunk: Chunk) -> Iterator[bytes]:
        is_failed = chunk.status not in _GOOD
        if chunk.is_last:
            self._left -= 1
            self._used = _sum(self._used, chunk.usage or Usage())
        is_end = is_failed or not self._left
        shown = chunk if is_failed else msgspec.structs.replace(chunk, usage=None)
        for event in self._events.add(shown):
            if event != DONE:
                yield event
        if is_end and self._has_usage and not is_failed:
            yield data_event({**self._events.head, "choices": [], "usage": usage_of(self._used)})
        if is_end:
            yield DONE
