"""Shows answers as they arrive: panels side by side on a terminal, otherwise lines.

Both views have the same methods and do not depend on where the text comes from.
"""

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.text import Text

from ops.demonstration.questions import Question

MIN_TEXT_LINES, MAX_TEXT_LINES = 2, 9
MIN_PANEL_WIDTH = 36
LINE_WIDTH = 90


@dataclass(slots=True)
class JobView:
    """One job with its text and state so far."""

    question: Question
    text: str = ""
    num_tokens: int = 0
    state: str = "queued"
    printed: int = field(default=0, repr=False)


class View(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def token(self, index: int, text: str, num_tokens: int) -> None: ...
    def ended(self, index: int, state: str) -> None: ...


class Panels:
    """Shows each answer in a panel of its own, which rich redraws 12 times a second."""

    def __init__(self, questions: Sequence[Question], console: Console) -> None:
        self._jobs = [JobView(question) for question in questions]
        self._started = time.monotonic()
        self._live = Live(self, console=console, refresh_per_second=12, transient=False)
        self._spinner = Spinner("dots")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def token(self, index: int, text: str, num_tokens: int) -> None:
        job = self._jobs[index]
        job.text += text
        job.num_tokens += num_tokens
        job.state = "running"

    def ended(self, index: int, state: str) -> None:
        self._jobs[index].state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        per_row = max(1, min(3, options.max_width // MIN_PANEL_WIDTH))
        width = options.max_width // per_row
        num_rows = -(-len(self._jobs) // per_row)
        # less the status line and the cursor's line below it
        height = (console.height - 2) // num_rows
        num_lines = max(MIN_TEXT_LINES, min(MAX_TEXT_LINES, height - 2))
        panels = [self._panel(job, width, num_lines) for job in self._jobs]
        yield Group(Columns(panels, width=width, padding=0), self._status(console))

    def _panel(self, job: JobView, width: int, num_lines: int) -> Panel:
        lines = textwrap.wrap(job.text, width - 4, drop_whitespace=True) or [""]
        shown = lines[-num_lines:]
        colour = {"queued": "dim", "running": "cyan", "succeeded": "green"}.get(job.state, "red")
        return Panel(
            Text("\n".join(shown)),
            title=Text(job.question.text, overflow="ellipsis", no_wrap=True),
            title_align="left",
            subtitle=f"{job.question.priority} · {job.state} · {job.num_tokens} tokens",
            subtitle_align="right",
            border_style=colour,
            width=width,
            height=num_lines + 2,
        )

    def _status(self, console: Console) -> Text:
        seconds = time.monotonic() - self._started
        tokens = sum(job.num_tokens for job in self._jobs)
        open_jobs = sum(job.state in ("queued", "running") for job in self._jobs)
        line = f"{tokens} tokens in {seconds:.1f} s, {tokens / max(seconds, 0.1):.0f} tokens/s"
        if open_jobs:
            line = f"{self._spinner.render(console.get_time())} {line}, {open_jobs} jobs open"
        return Text(line, no_wrap=True, overflow="ellipsis")


class Lines:
    """Prints answers line by line, with the time and the job's number, for logs and pipes."""

    def __init__(self, questions: Sequence[Question], console: Console) -> None:
        self._jobs = [JobView(question) for question in questions]
        self._console = console
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        for number, job in enumerate(self._jobs, 1):
            self._print(number, f"? {job.question.text}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def token(self, index: int, text: str, num_tokens: int) -> None:
        job = self._jobs[index]
        job.text += text
        job.num_tokens += num_tokens
        waiting = job.text[job.printed :]
        if len(waiting) >= LINE_WIDTH or "\n" in waiting:
            self._flush(index)

    def ended(self, index: int, state: str) -> None:
        self._flush(index)
        self._print(index + 1, f"= {state}, {self._jobs[index].num_tokens} tokens")

    def _flush(self, index: int) -> None:
        job = self._jobs[index]
        for line in job.text[job.printed :].splitlines():
            if line.strip():
                self._print(index + 1, f"  {line.strip()}")
        job.printed = len(job.text)

    def _print(self, number: int, text: str) -> None:
        seconds = time.monotonic() - self._started
        self._console.print(
            f"[{seconds:5.1f} s] job {number} {text}", markup=False, highlight=False, soft_wrap=True
        )


def choose_view(questions: Sequence[Question], console: Console) -> View:
    return Panels(questions, console) if console.is_terminal else Lines(questions, console)
