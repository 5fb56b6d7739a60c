"""Answers as the terminal shows them."""

import pytest

from tokenmill.cli.views.job_output import show_answer
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
