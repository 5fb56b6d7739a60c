"""Tests the pauses of Backoff: growth, limit, spread, and a pause that a server asks for."""

import pytest

from tokenmill.transport.backoff import Backoff


def test_pauses_grow_by_the_factor_up_to_the_longest():
    backoff = Backoff(first_s=0.5, longest_s=5.0, factor=3.0, spread=(1.0, 1.0))
    assert [backoff.delay_s(failures) for failures in (0, 1, 2, 3, 4, 10_000)] == [
        0.5,
        0.5,
        1.5,
        4.5,
        5.0,
        5.0,
    ]


def test_each_pause_is_spread_at_random():
    backoff = Backoff(first_s=1.0, spread=(0.75, 1.25))
    pauses = {backoff.delay_s(1) for _ in range(20)}
    assert len(pauses) == 20
    assert all(0.75 <= pause <= 1.25 for pause in pauses)


@pytest.mark.parametrize(("asked_s", "pause_s"), [(0.1, 1.0), (50.0, 50.0), (1e8, 60.0)])
def test_a_pause_that_the_server_asks_for_is_kept_up_to_the_longest(asked_s, pause_s):
    backoff = Backoff(first_s=1.0, longest_s=60.0, spread=(1.0, 1.0))
    assert backoff.delay_s(1, asked_s) == pause_s
