"""Names and numbers the events of a response's stream.

A number depends on the request and on the tokens alone: not on the borders of chunks, nor on the
gateway, the worker or the time. So any gateway continues behind any number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenmill.openai.pieces import pieces_of
from tokenmill.openai.response_items import Change, GrowingItem, GrowingOutput
from tokenmill.openai.response_object import Status, shown_response, status_of
from tokenmill_gateway.events import DONE, encode
from tokenmill_gateway.queues import completed_at
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.openai import OutputText, ReasoningText, ResponseObject, TokenLogprobs

_DELTAS: Final = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_LAST: Final[Mapping[Status, str]] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # OpenAI has no event of its own for it
    "failed": "response.failed",
}


class ResponseEvents:
    """The events of one response, each as the bytes to send; those up to the number
    `starting_after` are left out.

    Args:
        repeated: members that the response repeats of its request.
        has_ids: give each event its number as its id, for a browser's EventSource.
    """

    def __init__(
        self,
        job_id: str,
        model: str,
        created_at: int,
        repeated: Mapping[str, Any],
        *,
        starting_after: int = -1,
        has_ids: bool = False,
    ) -> None:
        self._job_id = job_id
        self._model = model
        self._created_at = created_at
        self._repeated = repeated
        self._seen = starting_after
        self._has_ids = has_ids
        self._number = 0
        self._output = GrowingOutput(job_id)
        self._delta_item: GrowingItem | None = None
        self._delta = (b"", b"")  # a delta's bytes before its number, and between it and its text

    def begin(self) -> Iterator[bytes]:
        """Yield the events before the first token."""
        is_background = bool(self._repeated.get("background"))
        waiting = self._response("queued" if is_background else "in_progress")
        yield from self._event("response.created", response=waiting)
        if is_background:
            yield from self._event("response.queued", response=waiting)
        yield from self._event("response.in_progress", response=self._response("in_progress"))

    def add(self, chunk: Chunk) -> Iterator[bytes]:
        """Yield the events of a chunk; those of the end behind its last."""
        item = self._delta_item
        if item is not None and _is_text(chunk, item):
            item.parts.append(chunk.text)
            yield from self._delta_of(item, chunk.text)
        elif chunk.choice == 0:
            for piece in pieces_of(chunk):
                for change in self._output.add(piece):
                    yield from self._change(change)
        if chunk.status is not None:
            yield from self._end(chunk)

    def _end(self, chunk: Chunk) -> Iterator[bytes]:
        assert chunk.status is not None
        status = status_of(chunk.status, chunk.finish_reason)
        for change in self._output.end(
            is_whole=status == "completed",
            has_whole_calls=chunk.finish_reason is FinishReason.TOOL_CALLS,
        ):
            yield from self._change(change)
        if status == "failed":
            message = chunk.error.message if chunk.error else "the job ended without an answer"
            code = chunk.error.code if chunk.error else None
            yield from self._event("error", code=code, message=message, param=None)
        used = chunk.usage
        ended = completed_at(self._job_id, used)
        last = shown_response(
            self._job_id,
            self._model,
            self._created_at,
            status,
            self._repeated,
            output=self._output.items(),
            completed_at=ended if status in ("completed", "incomplete") else None,
            usage=used,
            error=chunk.error,
        )
        if status == "failed":  # without its tokens, it ends before the number that was seen
            self._seen = min(self._seen, self._number - 1)
        yield from self._event(_LAST[status], response=last)
        yield DONE

    def _response(self, status: Status) -> ResponseObject:
        return shown_response(self._job_id, self._model, self._created_at, status, self._repeated)

    def _change(self, change: Change) -> Iterator[bytes]:
        match change.what:
            case "begins":
                yield from self._item_event("response.output_item.added", change.item)
                if change.item.kind != "function_call":
                    yield from self._part_event("response.content_part.added", change.item, "")
            case "grows":
                yield from self._grown(change)
            case "ends":
                yield from self._ended(change.item)

    def _grown(self, change: Change) -> Iterator[bytes]:
        return self._delta_of(change.item, change.delta, change.logprobs)

    def _delta_of(
        self, item: GrowingItem, text: str, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> Iterator[bytes]:
        number = self._number
        self._number += 1
        if number <= self._seen:
            return
        if self._delta_item is not item:
            self._delta_item, self._delta = item, self._constant(item)
        before, after = self._delta
        scores = b""
        if item.kind == "message":
            scores = b',"logprobs":' + encode(logprobs) if logprobs else b',"logprobs":[]'
        digits = b"%d" % number
        head = b"id: " + digits + b"\n" if self._has_ids else b""
        yield head + before + digits + after + encode(text) + scores + b"}\n\n"

    def _constant(self, item: GrowingItem) -> tuple[bytes, bytes]:
        kind = f"{_DELTAS[item.kind]}.delta"
        members = {"type": kind, **_place(item)}
        opened = encode(members)[:-1]
        before = b"event: " + kind.encode() + b"\ndata: " + opened + b',"sequence_number":'
        return before, b',"delta":'

    def _ended(self, item: GrowingItem) -> Iterator[bytes]:
        done, text = f"{_DELTAS[item.kind]}.done", item.text
        if item.kind == "function_call":
            yield from self._event(done, **_place(item), name=item.name, arguments=text)
        else:
            scores = {"logprobs": item.logprobs} if item.kind == "message" else {}
            yield from self._event(done, **_place(item), text=text, **scores)
            yield from self._part_event("response.content_part.done", item, text)
        yield from self._item_event("response.output_item.done", item)

    def _item_event(self, name: str, item: GrowingItem) -> Iterator[bytes]:
        return self._event(name, output_index=item.index, item=item.item())

    def _part_event(self, name: str, item: GrowingItem, text: str) -> Iterator[bytes]:
        part: OutputText | ReasoningText = ReasoningText(text)
        if item.kind == "message":
            part = OutputText(text=text, logprobs=item.logprobs if text else [])
        return self._event(name, **_place(item), part=part)

    def _event(self, name: str, /, **members: object) -> Iterator[bytes]:
        number = self._number
        self._number += 1
        if number <= self._seen:
            return
        data = encode({"type": name, "sequence_number": number, **members})
        head = b"id: %d\n" % number if self._has_ids else b""
        yield head + b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _is_text(chunk: Chunk, item: GrowingItem) -> bool:
    """Return whether a chunk is the usual one: a token that goes on with the message's text."""
    is_other = chunk.reasoning or chunk.tool_calls or chunk.logprobs or chunk.choice
    goes_on = item.kind == "message" and item.status == "in_progress"
    return goes_on and not is_other and chunk.status is None and len(chunk.token_ids) == 1


def _place(item: GrowingItem) -> dict[str, object]:
    place: dict[str, object] = {"item_id": item.id, "output_index": item.index}
    return place if item.kind == "function_call" else {**place, "content_index": 0}
