"""Runs rounds in which every engine has a turn; the order reverses from round to round.

A turn begins when the cores are idle again after the one before. Each turn is reported as it ends,
so an interrupted run keeps what was finished.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ops.benchmarks.measure.disturbance import CoreWatch, Disturbance, wait_until_quiet
from ops.benchmarks.measure.figures import equal_requests, equal_tokens, medians, of_round, spread
from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.workload_files import Workload
from ops.benchmarks.peers.child import Child
from ops.benchmarks.peers.environments import Waiting

FLOOR = "floor"  # the engine whose tokens mean nothing


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine's part of a round."""

    measured: Round
    figures: dict[str, float]
    disturbance: Disturbance | None = None


@dataclass(slots=True)
class Measurement:
    """Turns of each engine, in the order of `names`; the first is compared with the others."""

    workload: Workload
    names: tuple[str, ...]
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = self.turns or {name: [] for name in self.names}

    @property
    def num_rounds(self) -> int:
        """Number of rounds that all engines have finished."""
        return min(len(turns) for turns in self.turns.values())

    @property
    def rounds(self) -> dict[str, list[dict[str, float]]]:
        """Figures of all finished turns, by engine."""
        return {name: [turn.figures for turn in turns] for name, turns in self.turns.items()}

    def results(self) -> dict[str, dict[str, object]]:
        """Return the figures of each engine over the rounds that all engines have finished."""
        if not self.num_rounds:
            return {}
        ours, *others = self.names
        return {ours: self._figures(ours)} | {
            name: self._figures(name) | self._compared(name) for name in others
        }

    def _figures(self, name: str) -> dict[str, object]:
        rounds = self.rounds[name][: self.num_rounds]
        speeds = [figures["output_tok_s"] for figures in rounds]
        return {**medians(rounds), "spread": spread(speeds)}

    def _compared(self, name: str) -> dict[str, object]:
        """Compare the first engine with this one, round by round: ratios drift less than speeds."""
        turns = list(zip(self.turns[self.names[0]], self.turns[name], strict=False))
        ratios = [
            mine.figures["output_tok_s"] / theirs.figures["output_tok_s"] for mine, theirs in turns
        ]
        found: dict[str, object] = {"ratio": statistics.median(ratios), "ratios": ratios}
        if name == FLOOR:
            return found
        pairs = [(mine.measured, theirs.measured) for mine, theirs in turns]
        equal = min(equal_requests(ours, theirs)[0] for ours, theirs in pairs)
        return found | {
            "same": f"{equal}/{len(self.workload.requests)}",
            "is_equal": equal == len(self.workload.requests),
            "equal_tokens": min(equal_tokens(ours, theirs) for ours, theirs in pairs),
        }


def run_rounds(
    children: Sequence[Child],
    measurement: Measurement,
    count: int,
    waiting: Waiting,
    on_turn: Callable[[str, Turn], None],
) -> None:
    """Warm up, then run `count` rounds; `on_turn` is called after every turn."""
    workload = measurement.workload
    for child in children:
        waiting(f"{workload.name}: {child.kind.name} warms up")
        child.run(workload.first(4, 8))
    for number in range(count):
        for child in children if number % 2 == 0 else reversed(children):
            waiting(f"{workload.name}: round {number + 1} of {count}, {child.kind.name}")
            turn = _turn(child, workload)
            measurement.turns[child.kind.name].append(turn)
            on_turn(child.kind.name, turn)


def _turn(child: Child, workload: Workload) -> Turn:
    wait_until_quiet()
    watch = CoreWatch(child.pid)
    measured = child.run(workload)
    disturbance = watch.read()
    figures = of_round(workload, measured)
    if disturbance is not None:
        figures |= {"others_share": disturbance.others, "stolen_share": disturbance.stolen}
    return Turn(measured, figures, disturbance)
