"""Draws what `engine` and `service` measured, from the same record that `--json` writes.

A row of bars for each figure, a column for each workload: the bar is the median over the rounds,
its whisker goes from the worst round to the best. matplotlib is imported when something is drawn;
it comes with the extra `bench`.
"""

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.benchmarks.measure.tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMANDS = ("engine", "service")
FORMATS = (".png", ".svg", ".pdf")
OURS, PEER, FLOOR, INK = "#0072B2", "#8FA9BC", "#BBBBBB", "#333333"
FIGURES = {
    "output_tok_s": "output tokens per second",
    "prompt_tok_s": "prompt tokens per second",
    "ttft_p50_ms": "time to first token, ms",
    "tpot_p50_ms": "time per output token, ms",
}


class PictureError(ValueError):
    """Nothing can be drawn; one sentence for the user."""


def check(path: Path) -> None:
    """Check that the picture can be drawn, before a measurement starts."""
    if path.suffix not in FORMATS:
        raise PictureError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise PictureError(f"there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PictureError("drawing needs matplotlib: pip install '.[bench]' in tokenmill's folder")


def draw(record: dict[str, Any], path: Path) -> Path:
    check(path)
    rounds = {
        workload: engines
        for workload, engines in record.get("rounds", {}).items()
        if all(engines.values())
    }
    if not rounds:
        raise PictureError("the record holds no finished round")
    from matplotlib.figure import Figure

    names = list(next(iter(rounds.values())))
    size = (2.0 + 2.9 * len(rounds), 1.0 + len(FIGURES) * (0.6 + 0.3 * len(names)))
    figure = Figure(figsize=size, layout="constrained")
    machine = record.get("machine", {})
    figure.suptitle(
        f"{machine.get('cpu', 'an unknown machine')}, {machine.get('cores', '?')} cores"
    )
    grid = figure.subplots(len(FIGURES), len(rounds), squeeze=False)
    for column, (workload, engines) in enumerate(rounds.items()):
        grid[0][column].set_title(workload, loc="left", weight="bold")
        for row, (key, words) in enumerate(FIGURES.items()):
            values = [[figures.get(key, 0.0) for figures in engines[name]] for name in names]
            _bars(grid[row][column], names, values, has_names=column == 0)
            grid[row][column].set_xlabel(words)
    figure.savefig(path, dpi=150)
    return path


def _bars(
    axes: "Axes", names: Sequence[str], values: Sequence[Sequence[float]], has_names: bool
) -> None:
    for place, (name, rounds) in enumerate(zip(names, values, strict=True)):
        middle = statistics.median(rounds)
        colour = FLOOR if name.startswith("floor") else PEER if place else OURS
        whisker = [[middle - min(rounds)], [max(rounds) - middle]]
        axes.barh(place, middle, height=0.66, color=colour, xerr=whisker, ecolor=INK, capsize=2.5)
        axes.annotate(
            number(middle) if middle else "none",
            (max(rounds), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(names)), names if has_names else [""] * len(names))
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
