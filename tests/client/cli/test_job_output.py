"""Answers as the terminal shows them."""

import re

import pytest

from tokenmill.cli.views.job_output import follow, show_answer
from tokenmill.testing import Answer, InMemoryQueue
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus, ToolCallDelta


def test_tool_calls_are_shown_in_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    deltas = (
        ToolCallDelta(0, "c1", "get"),
        ToolCallDelta(0, arguments='{"a": '),
        ToolCallDelta(0, arguments="1}"),
        ToolCallDelta(1, "c2", "now"),
        ToolCallDelta(1, arguments="{}"),
    )
    choice = ChoiceResult(text="I look.", call_deltas=deltas)
    show_answer(JobResult(job_id="a", status=JobStatus.SUCCEEDED, choices=(choice,)))
    assert capsys.readouterr().out == 'I look.\nget {"a": 1}\nnow {}\n'


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take stdout for a terminal with colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


THOUGHT = Answer("It is dry.", reasoning="Is it wet?", tool_calls=(("look", {}),))
DIMMED = re.compile(r"\x1b\[2m(.*?)\x1b\[0m")


@pytest.mark.usefixtures("terminal")
def test_thoughts_are_dimmed_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with InMemoryQueue(default=THOUGHT) as queue:
        for quiet in (False, True):
            follow(queue.client(), queue.client().submit(prompt="?"), quiet=quiet, timeout=30)
            shown = capsys.readouterr().out
            assert "".join(DIMMED.findall(shown)) == "Is it wet?"
            assert DIMMED.sub("", shown) == "\n\nIt is dry.\nlook {}\n"


def test_thoughts_stay_out_of_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with InMemoryQueue(default=THOUGHT) as queue:
        for quiet in (False, True):
            follow(queue.client(), queue.client().submit(prompt="?"), quiet=quiet, timeout=30)
            assert capsys.readouterr().out == "It is dry.\nlook {}\n"
