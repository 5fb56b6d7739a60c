"""Splits the events of steps that piled up into parts, which are published one after the other."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from tokenmill_worker.contract.events import TokenEvent

EVENTS_AT_ONCE = 512  # they take the event loop a millisecond or two


def split_batches(
    events: Sequence[TokenEvent], urgent: Container[str], at_once: int
) -> Iterator[Sequence[TokenEvent]]:
    """Yield the urgent requests' events first, then the others' in parts of at most `at_once`
    events. Between two parts, other tasks of the event loop can run. All events of one request are
    in one part, and so share chunks. At most `at_once` events are yielded as they are.
    """
    if len(events) <= at_once:
        yield events
        return
    first = [event for event in events if event.request_id in urgent]
    if first:
        yield first
    rest = [event for event in events if event.request_id not in urgent] if first else events
    part: list[TokenEvent] = []
    for of_one in _by_request(rest):
        if part and len(part) + len(of_one) > at_once:
            yield part
            part = []
        part += of_one
    if part:
        yield part


def _by_request(events: Iterable[TokenEvent]) -> Iterable[list[TokenEvent]]:
    found: dict[str, list[TokenEvent]] = {}
    for event in events:
        found.setdefault(event.request_id, []).append(event)
    return found.values()
