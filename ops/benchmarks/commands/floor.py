"""`ops/bench floor`: measures the linear layers alone, by kind and by number of rows, in turns.

The tokens per second are an upper bound for an engine whose steps hold that many decodes and do
nothing else. `ops/bench engine --floor KIND` measures the same on the engine's own steps.
"""

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from ops.benchmarks.measure.linear_stack import KINDS, LinearStack, shapes_of
from tokenmill_worker.engine.model.model_files import resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help=f"with commas; default: {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--tokens", default="1,8,32,64,256", help="packed tokens of a step, with commas"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: what torch chooses")


def run(options: argparse.Namespace) -> dict[str, object]:
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console()
    sizes = [int(size) for size in options.tokens.split(",")]
    kinds = options.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        console.print(
            f"ops/bench: no kind {', '.join(unknown)}; there are {', '.join(KINDS)}", style="red"
        )
        return {"ok": False}
    shapes = shapes_of(resolve(options.model))
    with torch.inference_mode(), console.status("packing weights"):
        stacks = [LinearStack(shapes, kind, max(sizes)) for kind in kinds]
    figures: list[dict[str, object]] = []
    table = Table(
        title=f"{options.model}, {torch.get_num_threads()} threads: ms a step (best), tok/s"
    )
    table.add_column("rows", justify="right")
    for kind in kinds:
        table.add_column(KINDS[kind], justify="right")
    for size in sizes:
        times = _in_turns(stacks, size, options.rounds)
        cells = []
        for stack, measured in zip(stacks, times, strict=True):
            median, best = statistics.median(measured), min(measured)
            figures.append(
                {"kind": stack.kind, "rows": size, "median_ms": 1e3 * median, "best_ms": 1e3 * best}
            )
            cells.append(f"{1e3 * median:,.1f} ({1e3 * best:,.1f})  {size / median:,.0f}")
        table.add_row(str(size), *cells)
    console.print(table)
    return {"floor": figures, "threads": torch.get_num_threads()}


@torch.inference_mode()
def _in_turns(stacks: list[LinearStack], size: int, rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in stacks]
    for number in range(rounds + 1):
        for stack, measured in zip(stacks, times, strict=True):
            started = time.perf_counter()
            stack.run(size, size)
            if number:  # the first round warms up
                measured.append(time.perf_counter() - started)
    return times
