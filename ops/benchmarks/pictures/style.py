"""Style of all pictures: Okabe and Ito's colour-blind-safe colours, few lines, named units."""

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, INK, PALE = "#0072B2", "#333333", "#BBBBBB"
COLOURS = (OURS, "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")


def new_figure(width: float, height: float, title: str, subtitle: str = "") -> Figure:
    matplotlib.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": PALE,
            "axes.labelcolor": INK,
            "axes.titlesize": 9.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "xtick.color": INK,
            "ytick.color": INK,
            "text.color": INK,
            "svg.fonttype": "none",
        }
    )
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}\n{subtitle}" if subtitle else title, x=0.01, ha="left", fontsize=10)
    return figure


def plain(axes: Axes, grid: str = "y") -> None:
    axes.grid(visible=True, axis=grid, color="#E6E6E6", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def machine_line(record: dict[str, Any]) -> str:
    machine = record.get("machine", {})
    return f"{machine.get('cpu', 'an unknown machine')}, {machine.get('cores', '?')} cores"


def number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
