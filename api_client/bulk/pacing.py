"""How much of a batch may be in the queue at once, and what whoever watches is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from api_client.bulk.batch import Totals

WINDOW: Final = 2_000
PATIENCE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Progress:
    """For whoever watches. `note`: what is waited for, "" when all is well. `generated`: tokens since the run began."""

    total: int
    in_flight: int
    totals: Totals
    note: str = ""
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Pacing:
    """`window`: jobs in the queue at once; enough for all workers' batches, and for what ends between two looks.
    `late_s`: so long after its deadline a job that no worker looks at is taken back."""

    window: int = WINDOW
    patience_s: float = PATIENCE_S
    late_s: float = 10.0
    watch: Callable[[Progress], object] = lambda _: None
