"""The worker's notes are read and joined with what the subscribers saw."""

from pathlib import Path

from ops.benchmarks.peers.worker_notes import Notes

LINES = """\
submit 9.5 a
step 10.0 1 1
step 11.0 2 3
token 10.0 a 1
token 11.0 a 2
token 12.0 a 2
"""


def test_notes_of_a_round_begin_where_it_began(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("token 1.0 earlier 1\n" + LINES)
    notes = Notes.read(path, len("token 1.0 earlier 1\n"))
    assert notes.submits == {"a": 9.5}
    assert dict(notes.ends) == {"a": {1: 10.0, 2: 11.0}}  # what was sent again was late before
    assert notes.steps == {10.0: 1, 11.0: 2}
    assert notes.are_complete({"a": 2}, 4)
    assert not notes.are_complete({"a": 3}, 4)
    assert not notes.are_complete({"a": 2}, 5)


def test_a_latency_is_from_the_steps_end_to_the_subscriber(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text(LINES)
    sent = {"a": {1: 12.0, 2: 15.5, 3: 16.0}}  # the third was sent by an earlier worker
    assert Notes.read(path, 0).latencies(sent) == [2.0, 4.5]
