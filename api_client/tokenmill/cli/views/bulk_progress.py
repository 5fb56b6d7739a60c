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

from tokenmill.bulk import Progress as Stand
from tokenmill.cli.output import err

_LINE_EVERY_S: Final = 10.0
_SPAN_S: Final = 15.0

Watch = Callable[[Stand], None]


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
def bulk_progress() -> Iterator[Watch]:
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
    with Progress(*columns, console=console, speed_estimate_period=_SPAN_S) as bar:
        task = bar.add_task(
            "", total=None, state="validating", failed="", rate=0.0, note="", start=False
        )
        rate = Rate()

        def watch(stand: Stand) -> None:
            if not stand.total:
                bar.update(task, note=stand.note)
                return
            if not bar.tasks[0].started:
                bar.start_task(task)
            failed = f"{stand.totals.failed} failed" if stand.totals.failed else ""
            per_second = rate.add(stand.generated)
            bar.update(task, total=stand.total, completed=stand.totals.ended)
            bar.update(task, state="answering", failed=failed, rate=per_second, note=stand.note)

        yield watch


def _lines() -> Watch:
    rate, console = Rate(), err()
    told_at, last_note = time.monotonic(), ""

    def watch(stand: Stand) -> None:
        nonlocal told_at, last_note
        per_second = rate.add(stand.generated)
        now = time.monotonic()
        if now - told_at < _LINE_EVERY_S and (not stand.total or stand.note == last_note):
            return
        told_at, last_note = now, stand.note
        words = f"{stand.totals.ended} of {stand.total} done, {stand.totals.failed} failed, {per_second:.0f} tok/s"
        console.print(f"{words}; {stand.note}" if stand.note else words, markup=False)

    return watch
