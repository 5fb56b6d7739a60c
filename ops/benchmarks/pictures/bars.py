"""Draws bars with their spread: engines per workload, and queues per figure, side by side.

A bar is the median over the rounds; its whisker goes from the worst round to the best.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ops.benchmarks.pictures import PictureError
from ops.benchmarks.pictures.style import INK, OURS, PALE, machine_line, new_figure, number, plain

PEER = "#8FA9BC"
LATENCIES = {
    "time to first token, s": ("ttft_p50_ms", "ttft_p99_ms", 1e-3),
    "time per output token, ms": (
        "tpot_p50_ms",
        "tpot_p99_ms",
        1.0,
    ),
}
QUEUES = {
    "submit_one_jobs_s": "handed in one by one, jobs/s",
    "submit_many_jobs_s": "handed in together, jobs/s",
    "jobs_s": "the whole way, jobs/s",
    "tokens_s": "tokens published and recorded, 1/s",
    "commands_per_job": "server commands per job (fewer is better)",
    "bytes_per_job": "bytes per waiting job (fewer is better)",
}


def figure_of(record: dict[str, Any]) -> Figure:
    return _queues(record) if record["command"] == "queue" else _engines(record)


# ── engines ──


def _engines(record: dict[str, Any]) -> Figure:
    results = [result for result in record.get("results", ()) if result.get("summary")]
    if not results:
        raise PictureError("the record holds no finished round")
    names = list(results[0]["summary"])
    figure = new_figure(
        1.6 + 2.9 * len(results),
        1.2 + 3 * (0.5 + 0.3 * len(names)),
        "Bars: medians over rounds; whiskers: worst and best round",
        machine_line(record),
    )
    grid = figure.subplots(3, len(results), squeeze=False)
    for column, result in enumerate(results):
        _throughput(grid[0][column], result, names)
        for row, (title, keys) in enumerate(LATENCIES.items(), 1):
            _latency(grid[row][column], result, names, title, keys)
        for axes in grid[:, column]:
            axes.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
            axes.invert_yaxis()
            axes.margins(x=0.22)
            axes.set_xlim(left=0)
            plain(axes, "x")
            axes.spines["left"].set_visible(False)
            if len(axes.get_xticks()):
                axes.locator_params(axis="x", nbins=4)
    return figure


def _throughput(axes: Axes, result: dict[str, Any], names: Sequence[str]) -> None:
    is_reading = result["output_tokens"] == result["requests"]
    key = "prompt_tok_s" if is_reading else "output_tok_s"
    axes.set_title(result["workload"])
    axes.set_xlabel(f"{'prompt' if is_reading else 'output'} tokens per second")
    _bars(
        axes,
        [_values(result, name, key) for name in names],
        [_colour(name, names) for name in names],
    )


def _latency(
    axes: Axes,
    result: dict[str, Any],
    names: Sequence[str],
    title: str,
    keys: tuple[str, str, float],
) -> None:
    """Draw the median request as the bar and the 99th percentile as a mark."""
    median, slow, scale = keys
    axes.set_xlabel(f"{title} (|: p99)")
    values = [[scale * value for value in _values(result, name, median)] for name in names]
    _bars(axes, values, [_colour(name, names) for name in names], labels=False)
    for place, name in enumerate(names):
        if tail := _values(result, name, slow):
            axes.plot(
                scale * statistics.median(tail),
                place,
                marker="|",
                markersize=11,
                color=INK,
                markeredgewidth=1.6,
            )
    if not any(values):
        axes.text(
            0.02, 0.5, "none: one token each", transform=axes.transAxes, color=INK, va="center"
        )
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)


def _values(result: dict[str, Any], name: str, key: str) -> list[float]:
    return [figures[key] for figures in result["rounds"][name] if key in figures]


def _colour(name: str, names: Sequence[str]) -> str:
    if name == names[0]:
        return OURS
    return PALE if name.startswith("floor") else PEER


def _bars(
    axes: Axes, values: Sequence[Sequence[float]], colours: Sequence[str], *, labels: bool = True
) -> None:
    for place, (rounds, colour) in enumerate(zip(values, colours, strict=True)):
        if not rounds:
            continue
        middle = statistics.median(rounds)
        hatch = "///" if colour == PALE else None
        axes.barh(
            place,
            middle,
            height=0.66,
            color=colour,
            hatch=hatch,
            edgecolor="white" if hatch else colour,
        )
        whisker = [[middle - min(rounds)], [max(rounds) - middle]]
        axes.errorbar(middle, place, xerr=whisker, color=INK, linewidth=1, capsize=2.5, capthick=1)
        if labels:
            axes.annotate(
                number(middle),
                (max(rounds), place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )


# ── queues ──


def _queues(record: dict[str, Any]) -> Figure:
    rounds = record["rounds"]["queue"]
    names = list(rounds)
    shown = [key for key in QUEUES if any(key in figures for figures in rounds[names[0]])]
    figure = new_figure(
        9.5,
        1.0 + (0.55 + 0.3 * len(names)) * -(-len(shown) // 2),
        "Queues beside one another: medians over rounds; whiskers: worst and best round",
        machine_line(record),
    )
    grid = figure.subplots(-(-len(shown) // 2), 2, squeeze=False)
    for place, key in enumerate(shown):
        axes = grid[place // 2][place % 2]
        axes.set_title(QUEUES[key])
        values = [[figures[key] for figures in rounds[name] if key in figures] for name in names]
        _bars(axes, values, [_colour(name, names) for name in names])
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.set_xlim(left=0)
        plain(axes, "x")
        axes.spines["left"].set_visible(False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    return figure
