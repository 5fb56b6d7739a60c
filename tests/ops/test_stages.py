"""A token's way by stage: the worker's notes are read, and joined with what the subscribers saw."""

from pathlib import Path

import pytest

from ops.benchmarks.measure.figures import stage_figures
from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.peers.stages import Notes, latencies

LINES = """\
submit 9.5 a
step 10.0 1 1
step 11.0 2 3
token 10.0 10.25 a 1
append 10.5 a 1
token 11.0 11.25 a 2
append 11.5 a 2
append 12.5 a 2
"""


def test_notes_of_a_round_begin_where_it_began(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("token 1.0 1.0 earlier 1\n" + LINES)
    notes = Notes.read(path, len("token 1.0 1.0 earlier 1\n"))
    assert notes.submits == {"a": 9.5}
    assert (dict(notes.ends), dict(notes.frames)) == (
        {"a": {1: 10.0, 2: 11.0}},
        {"a": {1: 10.25, 2: 11.25}},
    )
    assert dict(notes.appends) == {
        "a": {1: 10.5, 2: 11.5}
    }  # what was sent again was late the first time
    assert notes.steps == {10.0: 1, 11.0: 2}
    assert notes.are_complete({"a": 2}, 4)
    assert not notes.are_complete({"a": 3}, 4)
    assert not notes.are_complete({"a": 2}, 5)


def test_stages_add_up_to_the_whole_way(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text(LINES)
    heard, told = {"a": {2: 13.5}}, {"a": {1: 12.0, 2: 15.5}}  # the first token came from the log
    whole, stages = latencies(Notes.read(path, 0), heard, told)
    assert whole == [2.0, 4.5]
    assert stages == {"frame": [0.25], "chunk": [0.25], "server": [2.0], "told": [2.0]}
    figures = stage_figures(Round(1.0, [], [], [], stages=stages, script_calls=4, script_s=0.002))
    assert figures["stage_server_p50_ms"] == pytest.approx(2000)
    assert figures["script_ms"] == pytest.approx(0.5)
