"""Tests of the order in which a worker publishes its engine's events."""

from __future__ import annotations

from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.publish.publisher import split_batches


def event(name: str, token: int = 0) -> TokenEvent:
    return TokenEvent(request_id=name, token_ids=(token,))


def test_events_of_one_step_are_one_batch() -> None:
    events = tuple(event(str(number)) for number in range(4))
    assert [list(part) for part in split_batches(events, {"3"}, 4)] == [list(events)]
    # what waits for the log is sent without an event too
    assert list(split_batches((), {"3"}, 4)) == [()]


def test_urgent_events_of_piled_up_steps_go_first_and_the_others_in_parts() -> None:
    steps = [event(name, step) for step in range(3) for name in ("bulk 1", "urgent", "bulk 2")]
    parts = [
        [(each.request_id, each.token_ids[0]) for each in part]
        for part in split_batches(steps, {"urgent"}, 4)
    ]
    assert parts == [
        [("urgent", 0), ("urgent", 1), ("urgent", 2)],
        [("bulk 1", 0), ("bulk 1", 1), ("bulk 1", 2)],
        [("bulk 2", 0), ("bulk 2", 1), ("bulk 2", 2)],
    ]


def test_events_without_an_urgent_job_are_split_in_parts() -> None:
    events = [event(str(number)) for number in range(5)]
    assert [len(part) for part in split_batches(events, set(), 2)] == [2, 2, 1]


def test_waiting_events_of_one_request_stay_in_one_part() -> None:
    events = [
        event(name, step)
        for step in range(9)
        for name in ("a", "b", "c")
        if name != "c" or step < 2
    ]
    parts = [
        [(each.request_id, each.token_ids[0]) for each in part]
        for part in split_batches(events, set(), 4)
    ]
    assert parts == [
        [("a", step) for step in range(9)],
        [("b", step) for step in range(9)],
        [("c", 0), ("c", 1)],
    ]
