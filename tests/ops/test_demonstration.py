"""The demonstration's views: fed with the same calls, they show every answer whole."""

import io

import pytest
from rich.console import Console

from ops.demonstration.questions import Question
from ops.demonstration.stack import _last_words
from ops.demonstration.view import Lines, Panels, choose_view

QUESTIONS = (Question("Why?", "a", "standard"), Question("How?", "b", "bulk"))


def console(*, terminal: bool, width: int = 100, height: int = 40) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(
        file=out, force_terminal=terminal, width=width, height=height, legacy_windows=False
    ), out


def test_the_spinner_shows_a_whole_line_of_the_worker_s_log() -> None:
    line = "engine: weights in memory: 106.2 million as 4 bits, 28.3 million as 8 bits"
    log = (
        f"12:00:00.001 INFO    app: begin\n12:00:01.234 INFO    service: {line}\n12:00:02.000 "
        "INFO    serv"
    )
    assert _last_words(log) == line
    assert _last_words("UserWarning: of a library\n") == "UserWarning: of a library"
    assert _last_words("") == ""


def test_panels_are_chosen_on_a_terminal_and_lines_elsewhere() -> None:
    assert isinstance(choose_view(QUESTIONS, console(terminal=True)[0]), Panels)
    assert isinstance(choose_view(QUESTIONS, console(terminal=False)[0]), Lines)


def test_the_lines_view_shows_each_answer_once_and_whole() -> None:
    target, out = console(terminal=False)
    words = [f"word{number} " for number in range(60)]
    with Lines(QUESTIONS, target) as view:
        for word in words:
            view.token(0, word, 1)
            view.token(1, "x\n", 1)
        view.ended(0, "succeeded")
        view.ended(1, "cancelled")
    lines = out.getvalue().splitlines()
    first = " ".join(line.split("job 1   ")[1] for line in lines if "job 1   " in line)
    assert first.split() == [word.strip() for word in words]
    assert sum("job 2   x" in line for line in lines) == 60
    assert any(line.endswith("job 1 = succeeded, 60 tokens") for line in lines)
    assert any(line.endswith("job 2 = cancelled, 60 tokens") for line in lines)


def test_the_panels_view_shows_the_end_of_every_answer_and_the_sum() -> None:
    target, out = console(terminal=True)
    panels = Panels(QUESTIONS, target)
    for number in range(200):
        panels.token(0, f"word{number} ", 1)
    panels.token(1, "[bold]not markup[/bold]", 1)
    panels.ended(0, "succeeded")
    target.print(panels)
    text = out.getvalue()
    assert "word199" in text
    assert "word0 " not in text, "the beginning has scrolled away"
    assert "[bold]not markup[/bold]" in text
    assert "200 tokens" in text
    assert "201 tokens in" in text
    assert "1 jobs open" in text


@pytest.mark.parametrize(("width", "height"), [(30, 12), (80, 24), (200, 60)])
def test_the_panels_view_fits_the_terminal(width: int, height: int) -> None:
    target, out = console(terminal=False, width=width, height=height)
    target.print(Panels(QUESTIONS, target))
    lines = out.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    assert len(lines) < height
