"""A stamped worker's notes are read and joined with what the subscribers saw."""

from pathlib import Path

from ops.benchmarks.peers.whole_way import latencies, read_notes

LINES = """\
10.0 a 1
11.0 a 2
12.0 a 2
"""


def test_notes_of_a_round_are_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("1.0 earlier 1\n" + LINES)
    notes = read_notes(path, len("1.0 earlier 1\n"))
    assert notes == {"a": {1: 10.0, 2: 11.0}}, "what was sent again was late before"


def test_a_latency_is_from_the_steps_end_to_the_subscriber() -> None:
    received = {"a": {1: 12.0, 2: 15.5, 3: 16.0}, "b": {1: 1.0}}  # b's notes are not there
    assert latencies({"a": {1: 10.0, 2: 11.0}}, received) == [2.0, 4.5]
