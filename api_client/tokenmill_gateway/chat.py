"""`POST /v1/chat/completions`, and completions of one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from tokenmill.openai.answers import answer_of, usage_of
from tokenmill.openai.logprobs import chat_logprobs, text_logprobs
from tokenmill.openai.request_body import fields_of
from tokenmill_gateway.answers import result_of
from tokenmill_gateway.bodies import flag, json_object
from tokenmill_gateway.events import DONE, around, data_event, encode
from tokenmill_gateway.keys import ApiKey
from tokenmill_gateway.queues import created_at
from tokenmill_gateway.refusals import (
    HttpRefusal,
    json_response,
    refused_by_job,
)
from tokenmill_gateway.server import Server
from tokenmill_gateway.streams import streamed
from tokenmill_gateway.submission import Submitted, priority_of, submit
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.openai import CHAT_URL, ChatCompletion, CompletionLogprobs
from tokenmill_schemas.result import JobResult, JobStatus

_ENDS: Final[dict[FinishReason | None, str]] = {
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}
_STREAM_OPTIONS: Final = ("include_usage", "include_obfuscation")


async def chat_completion(server: Server, request: Request) -> ASGIApp:
    key = await server.writer_of(request)
    return await completion(server, request, key, CHAT_URL, await json_object(request))


async def completion(
    server: Server, request: Request, key: ApiKey, url: str, body: dict[str, Any]
) -> ASGIApp:
    """Answer a chat or a completion, whole or as a stream."""
    is_stream = flag(body, "stream")
    options = stream_options(body, is_stream)
    priority = priority_of(body.pop("service_tier", None), key)
    fields = fields_of(url, body)
    one = await submit(request, server.queues, key, fields, priority=priority, stream=is_stream)
    prefix = "chatcmpl-" if url == CHAT_URL else "cmpl-"
    shown_id = f"{prefix}{one.job}"
    if not is_stream:
        result = await result_of(request, one, shown_id, server.answer_s)
        answer = answer_of(result, url)
        if isinstance(answer, ChatCompletion):
            answer = msgspec.structs.replace(answer, service_tier=one.tier)
        return json_response(answer, headers=one.headers)
    events = CompletionEvents(one, shown_id, url, has_usage=options.get("include_usage", False))
    return await streamed(server, request, one, shown_id, (), events.add)


def stream_options(body: dict[str, Any], is_stream: bool) -> dict[str, Any]:
    options = body.pop("stream_options", None) or {}
    if options and not is_stream:
        words = "stream_options needs stream to be true"
        raise HttpRefusal.of(400, "invalid_value", words, "stream_options")
    if not isinstance(options, dict) or any(name not in _STREAM_OPTIONS for name in options):
        words = f"stream_options may hold {' and '.join(_STREAM_OPTIONS)}"
        raise HttpRefusal.of(400, "unknown_parameter", words, "stream_options")
    return {name: flag(options, name) for name in list(options)}


class CompletionEvents:
    """The chunks of a chat or a completion, as OpenAI's API streams them."""

    def __init__(self, one: Submitted, shown_id: str, url: str, *, has_usage: bool) -> None:
        self._is_chat = url == CHAT_URL
        self._has_usage = has_usage
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self.head: dict[str, object] = {
            "id": shown_id,
            "object": kind,
            "created": created_at(one.job),
            "model": one.model,
            "system_fingerprint": None,
            "service_tier": one.tier,
        }
        extra: dict[str, object] = {"usage": None} if has_usage else {}
        before, self._after = around({**self.head, **extra}, "choices")
        self._before = b"data: " + before
        end = b',"finish_reason":null,"logprobs":null}]' + self._after + b"\n\n"
        text = b'{"content":' if self._is_chat else b""
        name = b'"delta":' if self._is_chat else b'"text":'
        self._text = self._before + b'[{"index":0,' + name + text, b"}" * self._is_chat + end
        self._begun: set[int] = set()
        self._sent: dict[int, int] = {}  # characters of each choice

    def add(self, chunk: Chunk) -> Iterator[bytes]:
        """Yield the events of a chunk; those of the end behind its last."""
        if self._is_text(chunk):
            before, after = self._text
            self._sent[0] = self._sent.get(0, 0) + len(chunk.text)
            if chunk.text:
                yield before + encode(chunk.text) + after
            return
        is_error = chunk.status is not None and chunk.status is not JobStatus.SUCCEEDED
        if self._is_chat and chunk.choice not in self._begun and not is_error:
            self._begun.add(chunk.choice)
            yield self._event(chunk.choice, {"role": "assistant", "content": ""})
        delta = self._delta(chunk)
        if delta or chunk.logprobs:
            yield self._event(chunk.choice, delta, chunk)
        is_end = chunk.finish_reason is not None and (chunk.n == 1) == (chunk.status is not None)
        if is_end and chunk.status in (None, JobStatus.SUCCEEDED, JobStatus.CANCELLED):
            yield self._event(chunk.choice, {}, end=_ENDS.get(chunk.finish_reason, "stop"))
        if chunk.status is not None:
            yield from self._end(chunk)

    def _is_text(self, chunk: Chunk) -> bool:
        """Return whether a chunk is the usual one: text of the first choice in its middle."""
        is_other = chunk.reasoning or chunk.tool_calls or chunk.logprobs or chunk.choice
        has_begun = 0 in self._begun or not self._is_chat
        return has_begun and not is_other and chunk.finish_reason is None and chunk.status is None

    def _end(self, chunk: Chunk) -> Iterator[bytes]:
        if chunk.status not in (JobStatus.SUCCEEDED, JobStatus.CANCELLED):
            assert chunk.status is not None
            failed = JobResult(job_id=chunk.job_id, status=chunk.status, error=chunk.error)
            yield data_event(refused_by_job(failed, str(self.head["id"])).error.body)
        elif self._has_usage and chunk.usage is not None:
            yield data_event({**self.head, "choices": [], "usage": usage_of(chunk.usage)})
        yield DONE

    def _delta(self, chunk: Chunk) -> dict[str, object]:
        delta: dict[str, object] = {}
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.tool_calls:
            delta["tool_calls"] = [
                {
                    "index": call.index,
                    **({"id": call.id, "type": "function"} if call.id else {}),
                    "function": {
                        **({"name": call.name} if call.name else {}),
                        "arguments": call.arguments,
                    },
                }
                for call in chunk.tool_calls
            ]
        return delta

    def _event(
        self,
        index: int,
        delta: dict[str, object],
        chunk: Chunk | None = None,
        end: str | None = None,
    ) -> bytes:
        choice: dict[str, object] = {"index": index, "finish_reason": end, "logprobs": None}
        if self._is_chat:
            choice["delta"] = delta
            choice["logprobs"] = chat_logprobs(chunk) if chunk is not None else None
        else:
            choice["text"] = delta.get("content", "")
            choice["logprobs"] = self._text_logprobs(chunk) if chunk is not None else None
        return self._before + encode([choice]) + self._after + b"\n\n"

    def _text_logprobs(self, chunk: Chunk) -> CompletionLogprobs | None:
        """Return the log-probabilities of a chunk; offsets count from the text's beginning."""
        found = text_logprobs(chunk, chunk.prompt)
        sent = self._sent.get(chunk.choice, 0)
        self._sent[chunk.choice] = sent + len(chunk.text)
        if found is None:
            return None
        offsets = [sent + offset for offset in found.text_offset]
        return msgspec.structs.replace(found, text_offset=offsets)
