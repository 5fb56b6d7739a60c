"""Tests of the order in which a worker publishes its engine's events."""

from __future__ import annotations

from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.publish.publisher import split_batches


def event(name: str, token: int = 0) -> TokenEvent:
    return TokenEvent(request_id=name, token_ids=(token,))


def test_one_step_goes_as_one() -> None:
    events = tuple(event(str(number)) for number in range(4))
    assert [list(part) for part in split_batches(events, {"3"}, 4)] == [list(events)]
    # what waits for the log is sent without an event too
    assert list(split_batches((), {"3"}, 4)) == [()]


def test_of_steps_that_piled_up_the_urgent_go_first_and_the_others_in_parts() -> None:
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


def test_without_an_urgent_job_the_others_go_in_parts_all_the_same() -> None:
    events = [event(str(number)) for number in range(5)]
    assert [len(part) for part in split_batches(events, set(), 2)] == [2, 2, 1]


def test_what_waits_of_a_request_is_never_parted() -> None:
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
