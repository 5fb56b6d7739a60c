"""Shows the progress of a bulk file on stderr: a bar in a terminal, else a line every ten
seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from rich.theme import Theme

from tokenmill.bulk import BatchProgress
from tokenmill.cli.output import err

_LINE_EVERY_S: Final = 10.0
_SPAN_S: Final = 15.0

# Colours mean: done, failed (red), waiting for something (yellow).
_THEME: Final = Theme(
    {
        "bar.back": "bright_black",  # rich's own grey is almost black, also on a light background
        "bar.complete": "green",
        "bar.finished": "green",
        "progress.percentage": "default",
        "progress.download": "default",
        "progress.remaining": "default",
        "progress.elapsed": "default",
    }
)

OnProgress = Callable[[BatchProgress], None]


class Rate:
    """Tokens per second over the last 15 seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, tokens: int) -> float:
        now = time.monotonic()
        self._samples.append((now, tokens))
        while now - self._samples[0][0] > _SPAN_S:
            self._samples.popleft()
        since, before = self._samples[0]
        return (tokens - before) / (now - since) if now > since else 0.0


class _Note(ProgressColumn):
    """The column that names what the run waits for; its text may be long."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], style="yellow", overflow="ellipsis", no_wrap=True)


@contextmanager
def bulk_progress() -> Iterator[OnProgress]:
    console = err()
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        TextColumn("{task.fields[state]}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("[red]{task.fields[failed]}"),
        TextColumn("{task.fields[rate]:.0f} tok/s"),
        TimeRemainingColumn(elapsed_when_finished=True),
        _Note(),
    )
    console.soft_wrap = False
    console.push_theme(_THEME)
    with Progress(*columns, console=console, speed_estimate_period=_SPAN_S) as bar:
        task = bar.add_task(
            "", total=None, state="validating", failed="", rate=0.0, note="", start=False
        )
        rate = Rate()

        def on_progress(progress: BatchProgress) -> None:
            if not progress.total:
                bar.update(task, note=progress.note)
                return
            if not bar.tasks[0].started:
                bar.start_task(task)
            failed = f"{progress.totals.failed} failed" if progress.totals.failed else ""
            per_second = rate.add(progress.generated)
            bar.update(task, total=progress.total, completed=progress.totals.ended)
            bar.update(task, state="answering", failed=failed, rate=per_second, note=progress.note)

        yield on_progress


def _lines() -> OnProgress:
    rate, console = Rate(), err()
    told_at, last_note = time.monotonic(), ""

    def on_progress(progress: BatchProgress) -> None:
        nonlocal told_at, last_note
        per_second = rate.add(progress.generated)
        now = time.monotonic()
        if now - told_at < _LINE_EVERY_S and (not progress.total or progress.note == last_note):
            return
        told_at, last_note = now, progress.note
        totals = progress.totals
        words = f"{totals.ended} of {progress.total} done, {totals.failed} failed, "
        words += f"{per_second:.0f} tok/s"
        console.print(f"{words}; {progress.note}" if progress.note else words, markup=False)

    return on_progress
