"""The number and the bytes of an event depend on the request and on the tokens alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tokenmill_gateway.response_events import ResponseEvents
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobError, JobStatus, ToolCallDelta, Usage

JOB = "01a22303-9cf8-7bcc-a910-a8c23f13e97a"
USAGE = Usage(prompt_tokens=3, completion_tokens=9, total_ms=1_950)


def token(index: int, text: str = "", reasoning: str = "", *calls: ToolCallDelta) -> Chunk:
    return Chunk(
        job_id=JOB, index=index, token_ids=(index,), text=text, reasoning=reasoning,
        tool_calls=calls,
    )  # fmt: skip


def end(index: int, status: JobStatus = JobStatus.SUCCEEDED, **more: Any) -> Chunk:
    more.setdefault("finish_reason", FinishReason.STOP)
    return Chunk(job_id=JOB, index=index, status=status, usage=USAGE, **more)


def joined(chunks: list[Chunk]) -> Chunk:
    """Return one chunk with the tokens of several, as a log or a slow reader has it."""

    def ends(name: str) -> tuple[int, ...]:
        return tuple(accumulate(len(getattr(one, name)) for one in chunks))

    return Chunk(
        job_id=JOB,
        index=chunks[0].index,
        token_ids=tuple(i for one in chunks for i in one.token_ids),
        text="".join(one.text for one in chunks),
        text_ends=ends("text"),
        reasoning="".join(one.reasoning for one in chunks),
        reasoning_ends=ends("reasoning"),
        tool_calls=tuple(
            msgspec.structs.replace(call, token=place)
            for place, one in enumerate(chunks)
            for call in one.tool_calls
        ),
    )


def sent(chunks: Iterable[Chunk], **options: Any) -> list[bytes]:
    repeated = options.pop("repeated", {})
    events = ResponseEvents(JOB, "m", 1_795_883_769, repeated, **options)
    return [*events.begin(), *(event for chunk in chunks for event in events.add(chunk))]


def read(events: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for event in events:
        if event != b"data: [DONE]\n\n":
            name, data = event.decode().removesuffix("\n\n").split("\ndata: ")
            value = json.loads(data)
            assert name.rpartition("event: ")[2] == value["type"]
            yield value


ANSWER = [
    token(0, reasoning="Hm"),
    token(1),  # a character that is not whole
    token(2, reasoning="…"),
    token(3),
    token(4, "It is "),
    token(5, "sunny"),
    token(6, "", "", ToolCallDelta(0, "c1", "sky", '{"at"')),
    token(7, "", "", ToolCallDelta(0, arguments=': "')),
    token(8, "", "", ToolCallDelta(0, arguments='noon"}'), ToolCallDelta(1, "c2", "sea", "{}")),
]


def test_an_answer_of_thoughts_text_and_calls_has_openai_s_events_in_order() -> None:
    names = [event["type"].removeprefix("response.") for event in read(sent([*ANSWER, end(9)]))]
    assert names == [
        "created", "in_progress",
        "output_item.added", "content_part.added", *["reasoning_text.delta"] * 4,
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", *["output_text.delta"] * 2,
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", *["function_call_arguments.delta"] * 3,
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip


def test_the_last_event_has_the_whole_answer() -> None:
    last = list(read(sent([*ANSWER, end(9)])))[-1]["response"]
    thoughts, message, first, second = last["output"]
    assert thoughts["content"][0]["text"] == "Hm…"
    assert message["content"][0]["text"] == "It is sunny"
    assert (first["name"], json.loads(first["arguments"])) == ("sky", {"at": "noon"})
    assert (second["call_id"], second["arguments"]) == ("c2", "{}")
    assert (last["status"], last["usage"]["output_tokens"]) == ("completed", 9)
    assert last["completed_at"] == 1_795_883_771  # 80 ms after its second the job was made


def test_numbers_begin_at_0_and_have_no_gap() -> None:
    for repeated in ({}, {"background": True}):
        numbers = [e["sequence_number"] for e in read(sent([*ANSWER, end(9)], repeated=repeated))]
        assert numbers == list(range(len(numbers)))


@given(st.sets(st.integers(1, len(ANSWER) - 1)))
def test_the_borders_of_chunks_change_no_event(borders: set[int]) -> None:
    places = [0, *sorted(borders), len(ANSWER)]
    chunks = [
        joined(ANSWER[first:last]) if last - first > 1 else ANSWER[first]
        for first, last in pairwise(places)
    ]
    assert sent([*chunks, end(9)]) == sent([*ANSWER, end(9)])


@given(st.integers(-1, 60))
def test_a_stream_goes_on_behind_any_number_with_the_events_that_are_missing(seen: int) -> None:
    whole = sent([*ANSWER, end(9)])
    assert sent([*ANSWER, end(9)], starting_after=seen) == [*whole[seen + 1 : -1], whole[-1]]


def test_text_that_was_held_back_until_the_end_is_a_delta_of_its_own() -> None:
    held = [token(0, "a"), token(1), end(2, text="EN", finish_reason=FinishReason.LENGTH)]
    deltas = [e["delta"] for e in read(sent(held)) if e["type"].endswith("text.delta")]
    assert deltas == ["a", "", "EN"]


def test_an_answer_without_a_token_has_an_empty_message() -> None:
    last = list(read(sent([end(0)])))[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == ""


def test_a_cut_answer_is_incomplete_and_its_last_item_too() -> None:
    last = list(read(sent([*ANSWER[:8], end(8, finish_reason=FinishReason.LENGTH)])))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    statuses = [item["status"] for item in last["response"]["output"]]
    assert statuses == ["completed", "completed", "incomplete"]


def test_a_cancelled_answer_ends_as_incomplete_with_its_text() -> None:
    cancelled = end(6, JobStatus.CANCELLED, finish_reason=FinishReason.CANCELLED)
    last = list(read(sent([*ANSWER[:6], cancelled])))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert last["response"]["output"][1]["content"][0]["text"] == "It is sunny"


def test_a_failed_answer_ends_with_an_error_and_failed() -> None:
    error = JobError("engine_error", "the engine failed")
    *_, said, last = read(sent([*ANSWER[:6], end(6, JobStatus.FAILED, error=error)]))
    assert (said["type"], said["message"]) == ("error", "the engine failed")
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine failed"}


def test_an_event_of_a_resumed_stream_has_its_number_as_its_id() -> None:
    for number, event in enumerate(sent([*ANSWER, end(9)], has_ids=True)[:-1]):
        assert event.startswith(b"id: %d\nevent: " % number)
