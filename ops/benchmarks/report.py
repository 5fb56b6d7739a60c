"""Rounds in turn and their report: one table per workload, ratios and equal tokens beside it."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.benchmarks.figures import equal_requests, equal_tokens, of_round, summary
from ops.benchmarks.peers.child import Child
from ops.benchmarks.peers.environments import Waiting
from ops.benchmarks.peers.protocol import Round
from ops.benchmarks.workload_files import Workload

SHOWN = {
    "output_tok_s": "output tok/s",
    "prompt_tok_s": "prompt tok/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p99_ms": "TPOT p99 ms",
    "steps": "steps",
    "tokens_per_step": "tokens/step",
    "batch_mean": "batch mean",
    "batch_max": "batch max",
    "cached_tokens": "cached tokens",
    "latency_p50_ms": "added ms p50",
    "latency_p99_ms": "added ms p99",
    "calls_per_step": "scripts/step",
}


def run_rounds(children: Sequence[Child], workload: Workload, count: int, waiting: Waiting) -> dict[str, list[Round]]:
    """Warm-up, then `count` rounds in which every engine has its turn; the order turns around each round."""
    for child in children:
        waiting(f"{workload.name}: {child.kind.name} warms up")
        child.run(workload.first(4, 8))
    rounds: dict[str, list[Round]] = {child.kind.name: [] for child in children}
    for number in range(count):
        for child in children if number % 2 == 0 else reversed(children):
            waiting(f"{workload.name}: round {number + 1} of {count}, {child.kind.name}")
            rounds[child.kind.name].append(child.run(workload))
    return rounds


def report(
    workload: Workload, rounds: dict[str, list[Round]], console: Console, floors: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The first engine named is compared with each of the others; it comes first in every ratio. `floors` have no
    tokens of their own.
    """
    each = {name: [of_round(workload, measured) for measured in done] for name, done in rounds.items()}
    summaries = {name: summary(figures) for name, figures in each.items()}
    num_requests = len(workload.requests)
    title = (
        f"{workload.name}: {num_requests} requests, {workload.num_prompt_tokens} prompt tokens, "
        f"{workload.num_output_tokens} output tokens; medians of {len(next(iter(each.values())))} rounds (± spread)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in summaries:
        table.add_column(name, justify="right")
    for figure, label in SHOWN.items():
        cells = [_cell(values.get(figure)) for values in summaries.values()]
        if any(cells):
            table.add_row(label, *cells)
    console.print(table)
    ours, *others = rounds
    comparisons = {
        name: _share(each, (ours, name), console) if name in floors else _compare((ours, name), each, rounds, console)
        for name in others
    }
    return {
        "workload": workload.name,
        "requests": num_requests,
        "rounds": each,
        "summary": summaries,
        "comparisons": comparisons,
        "equal": all(c["equal_requests"] == num_requests for name, c in comparisons.items() if name not in floors),
    }


def _compare(
    pair: tuple[str, str], each: dict[str, list[dict[str, float]]], rounds: dict[str, list[Round]], console: Console
) -> dict[str, float]:
    """The ratio is the median of the rounds' ratios, which drift less than the figures themselves."""
    ours, peer = pair
    ratios = _ratios(each, pair)
    ratio = statistics.median(ratios)
    equal, total = equal_requests(rounds[ours][0], rounds[peer][0])
    share = equal_tokens(rounds[ours][0], rounds[peer][0])
    console.print(
        f"{ours} / {peer}: {ratio:.2f} × (rounds: {', '.join(f'{r:.2f}' for r in ratios)}); "
        f"same tokens in {equal} of {total} requests ({share:.1%} of the tokens before a first difference)"
    )
    return {"ratio": ratio, "equal_requests": equal, "requests": total, "equal_tokens": share}


def _share(each: dict[str, list[dict[str, float]]], pair: tuple[str, str], console: Console) -> dict[str, float]:
    ours, floor = pair
    ratios = _ratios(each, pair)
    share = statistics.median(ratios)
    console.print(f"{ours} reaches {share:.1%} of the {floor} (rounds: {', '.join(f'{r:.1%}' for r in ratios)})")
    return {"ratio": share}


def _ratios(each: dict[str, list[dict[str, float]]], pair: tuple[str, str]) -> list[float]:
    ours, other = pair
    metric = "output_tok_s"
    return [mine[metric] / theirs[metric] for mine, theirs in zip(each[ours], each[other], strict=True)]


def _cell(value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{value['median']:,.1f} ± {value['spread']:.0%}"
