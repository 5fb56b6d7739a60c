"""Runs rounds in which every engine has a turn; the order reverses from round to round.

A turn begins when the cores are idle again after the one before. Each turn is reported as it ends,
so an interrupted run keeps what was finished.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ops.benchmarks.measure.disturbance import CoreWatch, Disturbance, wait_until_quiet
from ops.benchmarks.measure.figures import of_round
from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.workload_files import Workload
from ops.benchmarks.peers.child import Child
from ops.benchmarks.peers.environments import Waiting


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine's part of a round."""

    measured: Round
    figures: dict[str, float]
    disturbance: Disturbance | None


@dataclass(slots=True)
class Measurement:
    """Turns of each engine, in the order of `names`; the first engine is compared with the others.

    `floors` names the engines whose tokens mean nothing.
    """

    workload: Workload
    names: tuple[str, ...]
    floors: frozenset[str] = frozenset()
    quantization: str = ""  # of the first engine's weights
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = self.turns or {name: [] for name in self.names}

    @property
    def num_rounds(self) -> int:
        """Number of rounds that all engines have finished."""
        return min(len(turns) for turns in self.turns.values())

    @property
    def peers(self) -> tuple[str, ...]:
        return self.names[1:]

    def figures(self, name: str) -> list[dict[str, float]]:
        """Return an engine's figures of the rounds that all engines have finished."""
        return [turn.figures for turn in self.turns[name][: self.num_rounds]]

    def ratios(self, name: str) -> list[float]:
        """Return the first engine's tokens per second over this one's, by round.

        Ratios drift less than the figures themselves.
        """
        pairs = zip(self.figures(self.names[0]), self.figures(name), strict=True)
        return [mine["output_tok_s"] / theirs["output_tok_s"] for mine, theirs in pairs]

    def pairs(self, name: str) -> list[tuple[Round, Round]]:
        """Pair the first engine's rounds with this one's."""
        turns = zip(self.turns[self.names[0]], self.turns[name], strict=False)
        return [(mine.measured, theirs.measured) for mine, theirs in turns]


def run_rounds(
    children: Sequence[Child],
    measurement: Measurement,
    count: int,
    waiting: Waiting,
    told: Callable[[str, Turn], None],
) -> None:
    """Warm up, then run `count` rounds; `told` is called after every turn."""
    workload = measurement.workload
    for child in children:
        waiting(f"{workload.name}: {child.kind.name} warms up")
        child.run(workload.first(4, 8))
    for number in range(count):
        for child in children if number % 2 == 0 else reversed(children):
            waiting(f"{workload.name}: round {number + 1} of {count}, {child.kind.name}")
            turn = _turn(child, workload)
            measurement.turns[child.kind.name].append(turn)
            told(child.kind.name, turn)


def _turn(child: Child, workload: Workload) -> Turn:
    wait_until_quiet()
    watch = CoreWatch(child.pid)
    measured = child.run(workload)
    disturbance = watch.read()
    figures = of_round(workload, measured)
    if disturbance is not None:
        figures |= {"others_share": disturbance.others, "stolen_share": disturbance.stolen}
    return Turn(measured, figures, disturbance)
