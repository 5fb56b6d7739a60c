"""Prints the results of `ops/bench gpu`: a line after each measurement, and tables at the end."""

import json
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ops.benchmarks.measure.goals import GPU_GOALS

WIDTH = 160  # columns if the output is no terminal


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def describe(device: str) -> dict[str, Any]:
    """Return the device's properties and the versions of torch and transformers."""
    import transformers

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "name": device,
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name, "memory_gib": properties.total_memory / 2**30,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }  # fmt: skip
    return found


def tell(console: Console, what: str, found: Any) -> None:
    console.print(f"{what}: {_short(found)}", markup=False, highlight=False, soft_wrap=True)


def show(console: Console, record: dict[str, Any]) -> None:
    ceilings = record["ceilings"]
    console.print(
        f"ceilings: {ceilings['bytes_s'] / 1e9:,.1f} GB/s, {ceilings['operations_s'] / 1e12:,.2f} "
        "TFLOP/s",
        markup=False,
    )
    for name, found in record["results"].items():
        console.print(_table(name, found))
        for what, figures in found.items():
            if "profile" in what:
                console.print(_profile(f"{name}, {what}", figures))
    for line in goals(record):
        console.print(line, markup=False, highlight=False)
    for what, reason in record["left_out"].items():
        console.print(f"left out: {what}: {reason}", markup=False)


def goals(record: dict[str, Any]) -> list[str]:
    """Return a line for each measured goal: reached or missed, the figure and the target."""
    return [
        f"goal {'reached' if figures[figure] >= goal else 'missed'}: {name}, {what}: "
        f"{figure.replace('_', ' ')} {figures[figure]:.2f}, aimed at {goal:.2f}"
        for name, found in record["results"].items()
        for what, figures in found.items()
        for beginning, (figure, goal) in GPU_GOALS.items()
        if what.startswith(beginning) and figure in figures
    ]


def _table(name: str, found: dict[str, Any]) -> Table:
    table = Table(
        title=f"{name}: share of the ceilings, measured in this run", title_justify="left"
    )
    for column in ("", "tokens/s", "ms", "of the bandwidth", "of the roofline"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for what, figures in found.items():
        if "share_of_roofline" in figures:
            table.add_row(
                what, f"{figures['tokens_s']:,.0f}", f"{figures['step_ms']:.2f}",
                f"{figures['share_of_bandwidth']:.1%}", f"{figures['share_of_roofline']:.1%}",
            )  # fmt: skip
        elif "share_of_operations" in figures:
            took, share = f"{1e3 * figures['seconds']:.1f}", f"{figures['share_of_operations']:.1%}"
            table.add_row(what, f"{figures['tokens_s']:,.0f}", took, "", share)
        elif isinstance(figures.get("tokens_s"), dict):
            for engine, rate in figures["tokens_s"].items():
                table.add_row(f"{what}: {engine}", f"{rate:,.0f}", "", "", "")
        if "times_transformers" in figures:
            table.add_row(
                f"{what}: times Transformers", f"{figures['times_transformers']:.2f}", "", "", ""
            )
    return table


def _profile(title: str, figures: dict[str, Any]) -> Table:
    table = Table(title=f"{title}: device busy {figures['busy']:.1%}", title_justify="left")
    for column in ("", "ms a step", "share"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for kernel in figures["kernels"]:
        table.add_row(kernel["name"][:90], f"{kernel['ms']:.3f}", f"{kernel['share']:.1%}")
    for gap in figures["gaps"]:
        table.add_row(f"gap: {gap['between']}"[:90], f"{gap['ms']:.3f}", f"{gap['share']:.1%}")
    return table


def _short(found: Any) -> str:
    if isinstance(found, dict):
        pairs = (
            (name, value) for name, value in found.items() if not isinstance(value, list | dict)
        )
        return ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in pairs
        )
    return found if isinstance(found, str) else json.dumps(found)
