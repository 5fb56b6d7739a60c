"""Draws curves of the simulations: goodput and latency by load, one queue server by its workers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ops.benchmarks.pictures import PictureError
from ops.benchmarks.pictures.style import COLOURS, INK, MARKERS, new_figure, plain, tick

Rows = Sequence[dict[str, Any]]


def figure_of(record: dict[str, Any]) -> Figure:
    shown: list[tuple[Callable[[Sequence[Axes], str, Rows], None], str, Rows]] = []
    if record.get("engine"):
        shown.append((_load, "", record["engine"]["rows"]))
    queue = record["queue"]["rows"] if record.get("queue") else []
    mixes = dict.fromkeys(row["mix"] for row in queue)
    shown += [(_workers, mix, [row for row in queue if row["mix"] == mix]) for mix in mixes]
    if not any(rows for *_, rows in shown):
        raise PictureError("the record holds no simulation")
    figure = new_figure(
        12,
        0.5 + 3.2 * len(shown),
        "In virtual time: an H200 by its cost model, the queue by its scripts' costs",
    )
    grid = figure.subplots(len(shown), 3, squeeze=False)
    for row, (fill, name, rows) in zip(grid, shown, strict=True):
        fill(row, name, rows)
    return figure


def _load(row: Sequence[Axes], _name: str, rows: Rows) -> None:
    goodput, first, gap = row
    _curves(goodput, rows, ("load", "policy"), [("goodput", "-")])
    offered = sorted({(each["load"], each["offered"]) for each in rows})
    goodput.plot(
        *zip(*offered, strict=True), color=INK, linestyle=":", linewidth=1, label="offered"
    )
    goodput.set(
        title="Goodput: requests/s within their limits",
        xlabel="load, share of capacity",
        ylim=(0, None),
    )
    _curves(first, rows, ("load", "policy"), [("ttft_p50_s", "--"), ("ttft_p99_s", "-")])
    first.set(title="Time to first token, interactive, s", xlabel="load (solid: p99, dashed: p50)")
    _curves(gap, rows, ("load", "policy"), [("tpot_p50_ms", "--"), ("tpot_p99_ms", "-")])
    gap.set(
        title="Time per output token, ms", xlabel="load (solid: p99, dashed: p50)", ylim=(0, None)
    )
    _logarithmic(first)
    goodput.legend(frameon=False, fontsize=8)


def _workers(row: Sequence[Axes], name: str, rows: Rows) -> None:
    speed, use, claims = row
    key = ("workers", "kind")
    _curves(speed, rows, key, [("tokens_s", "-")])
    best = sorted({(each["workers"], each["offered_tokens_s"]) for each in rows})
    speed.plot(
        *zip(*best, strict=True),
        color=INK,
        linestyle=":",
        linewidth=1,
        label="what the devices could do",
    )
    speed.set(title=f"One queue, {name}: tokens/s of all workers", xlabel="workers")
    speed.legend(frameon=False, fontsize=8)
    _curves(use, rows, key, [("utilisation", "-")])
    use.set(title="Use of the queue server's thread", xlabel="workers", ylim=(0, 1.05))
    use.yaxis.set_major_formatter("{x:.0%}")
    _curves(claims, rows, key, [("claim_p50_ms", "--"), ("claim_p99_ms", "-")])
    claims.set(title="How long a claim takes, ms", xlabel="workers (solid: p99, dashed: p50)")
    _logarithmic(speed, claims)
    for axes in row:
        axes.set_xscale("log", base=2)
        ticks = sorted({each["workers"] for each in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()


def _curves(
    axes: Axes, rows: Rows, key: tuple[str, str], figures: Sequence[tuple[str, str]]
) -> None:
    """Draw a colour and mark per kind, a line style per figure; infinite values have no point."""
    across, kind = key
    for number, name in enumerate(dict.fromkeys(row[kind] for row in rows)):
        for figure, style in figures:
            points = [(row[across], row[figure]) for row in rows if row[kind] == name]
            points = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
            if points:
                axes.plot(
                    *zip(*sorted(points), strict=True),
                    color=COLOURS[number],
                    marker=MARKERS[number],
                    markersize=4.5,
                    linewidth=1.6 if style == "-" else 1.1,
                    linestyle=style,
                    label=name if style == "-" else None,
                )
    plain(axes)


def _logarithmic(*several: Axes) -> None:
    for axes in several:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(tick)
