"""The limits of a run over a batch, and the progress that it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenmill.bulk.batch import Totals

WINDOW: Final = 2_000
PATIENCE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run. `note` names what the run waits for, "" if nothing. `generated` counts
    the tokens since the run began.
    """

    total: int
    in_flight: int
    totals: Totals
    note: str = ""
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Pacing:
    """The limits of a run.

    `window`: jobs in the queue at once. It has to be enough for the batches of all workers, and for
    the jobs that end between two polls. `late_s`: seconds after its deadline at which a job that no
    worker has ended is cancelled.
    """

    window: int = WINDOW
    patience_s: float = PATIENCE_S
    late_s: float = 10.0
    watch: Callable[[Progress], object] = lambda _: None
