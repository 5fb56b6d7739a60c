"""Keeps the figures of engines that take turns, and compares the first with each of the others."""

import statistics
from collections.abc import Sequence
from typing import Any

from ops.benchmarks.measure.figures import medians, of_round
from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.workload_files import Workload

KILLED = ("lost", "repeated")  # tokens, over the deaths of all parts
FLOOR = "floor"  # the engine whose tokens mean nothing


class Measurement:
    """Finished turns of each engine on one workload; `rounds` has their figures, by engine.

    `kills` has what readers noticed of the death of each part, by engine and part.
    """

    def __init__(self, workload: Workload, names: Sequence[str]) -> None:
        self.workload, self.names = workload, tuple(names)
        self.rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        self.kills: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
        self._answers: dict[str, list[list[list[int]]]] = {name: [] for name in names}

    @property
    def num_rounds(self) -> int:
        """Number of rounds that all engines have finished."""
        return min(map(len, self.rounds.values()))

    def add(self, name: str, measured: Round, **further: float) -> dict[str, float]:
        """Keep an engine's turn; return its figures, `further` ones included."""
        figures = of_round(self.workload, measured) | further
        self.rounds[name].append(figures)
        self._answers[name].append(measured.tokens)
        return figures

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each engine over the rounds that all engines have finished."""
        if not self.num_rounds:
            return {}
        found: dict[str, dict[str, Any]] = {
            name: {**medians(self.rounds[name][: self.num_rounds])} for name in self.names
        }
        for name, kills in self.kills.items():
            if kills:
                sums = {key: sum(kill[key] for kill in kills.values()) for key in KILLED}
                found[name] |= {**sums, "kills": kills}
        for name in self.names[1:]:
            ratios = self.ratios(name, "output_tok_s")
            found[name] |= {"ratio": statistics.median(ratios), "ratios": ratios}
            if steady := self.ratios(name, "steady_tok_s"):
                found[name]["steady_ratio"] = statistics.median(steady)
            if name != FLOOR:
                equal = self._num_equal(name)
                found[name] |= {"same": f"{equal}/{len(self.workload.requests)}"}
                found[name] |= {"is_equal": equal == len(self.workload.requests)}
        return found

    def ratios(self, name: str, figure: str) -> list[float]:
        """Return the first engine's figure over this one's by round: it drifts less than both.

        Rounds in which one of them has no such figure are left out.
        """
        pairs = zip(self.rounds[self.names[0]], self.rounds[name], strict=False)
        return [
            mine[figure] / theirs[figure]
            for mine, theirs in pairs
            if figure in mine and figure in theirs
        ]

    def _num_equal(self, name: str) -> int:
        """Count the requests with the first engine's tokens, in the round with the fewest."""
        rounds = zip(self._answers[self.names[0]], self._answers[name], strict=False)
        return min(sum(a == b for a, b in zip(*both, strict=True)) for both in rounds)
