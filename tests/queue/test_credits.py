"""The room of an engine: its last frame, minus what this frame does not count."""

from __future__ import annotations

import msgspec
import pytest

from tokenmill_worker.contract.events import Capacity
from tokenmill_worker.queue.consumer import LOOKAHEAD, Credits, credits_of

HALF_FULL = Capacity(
    free_sequences=16,
    free_blocks=100,
    waiting=0,
    running=16,
    block_size=16,
    max_model_len=4096,
    free_urgent=16,
)
FULL_OF_BULK = msgspec.structs.replace(
    HALF_FULL, free_sequences=0, waiting=4, running=32, free_urgent=32
)


def ids(prefix: str, count: int) -> dict[str, None]:
    return {f"{prefix}{i}": None for i in range(count)}


def test_jobs_that_the_frame_counts_take_no_more_room() -> None:
    assert credits_of(HALF_FULL, ids("a", 16), (), ids("a", 16)) == Credits(16 + LOOKAHEAD, 0)


def test_bulk_jobs_in_preparation_take_no_room_from_interactive_jobs() -> None:
    assert credits_of(HALF_FULL, ids("a", 16), ids("b", 30), ids("a", 16)) == Credits(0, 16)


@pytest.mark.parametrize("is_sent", [True, False])
def test_interactive_jobs_that_no_frame_counts_take_room(is_sent: bool) -> None:
    bulk, urgent = ids("bulk", 36), ids("urgent", 10)
    in_engine = bulk | urgent if is_sent else bulk
    preparing = () if is_sent else urgent
    assert credits_of(FULL_OF_BULK, in_engine, preparing, urgent) == Credits(0, 22)


def test_bulk_jobs_sent_after_interactive_jobs_take_no_room_from_them() -> None:
    in_engine = ids("urgent", 16) | ids("bulk", 30)
    assert credits_of(HALF_FULL, in_engine, (), ids("urgent", 16)) == Credits(0, 16)


def test_a_frame_that_counts_more_sequences_than_requests_hides_no_job_in_preparation() -> None:
    """A request for several choices runs as several sequences."""
    assert credits_of(HALF_FULL, ids("a", 4), ids("b", 20), ()) == Credits(0, 16)
