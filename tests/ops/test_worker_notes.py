"""A stamped worker's notes are joined with what the subscribers saw."""

from ops.benchmarks.peers.whole_way import latencies

NOTES = """\
10.0 a 1
11.0 a 2
12.0 a 2
"""


def test_a_latency_is_from_the_steps_end_to_the_subscriber() -> None:
    received = {"a": {1: 12.0, 2: 15.5, 3: 16.0}, "b": {1: 1.0}}  # b's notes are not there
    assert latencies(NOTES, received) == [2.0, 4.5], "what was sent again was late before"
