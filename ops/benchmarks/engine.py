"""`ops/bench engine`: output tokens per second of the bare engine, and of its peers on the same file in the same run.

Engines alternate round by round, each in its own process, so that a machine whose speed drifts treats
all alike; what counts is the ratio. Greedy float32 answers must be equal, token for token.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ops.benchmarks.figures import equal_requests, equal_tokens, of_round, summary
from ops.benchmarks.peers.child import Child, ChildError, Kind
from ops.benchmarks.peers.environments import BuildError, PeerEnvironment, Waiting
from ops.benchmarks.peers.protocol import EngineOptions, Round
from ops.benchmarks.workload_files import SHAPES, Workload, generate, load

OURS = "tokenmill"
PEERS = ("transformers", "vllm")
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
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="FILE",
        help=f"a workload file or a shape ({', '.join(SHAPES)}); repeatable; default: decode",
    )
    parser.add_argument("--peer", action="append", default=[], choices=PEERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of generated shapes")
    parser.add_argument("--share", type=float, default=1.0, help="scale the number of requests of generated shapes")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=0, help="0: what torch chooses")
    parser.add_argument("--pool-tokens", type=int, default=32_768)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of our engine (EngineConfig), value as JSON or text; repeatable",
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    console = Console()
    try:
        workloads = [_workload(name, arguments) for name in arguments.workload or ["decode"]]
        return _measure(arguments, workloads, console)
    except (BuildError, ChildError, ValueError, OSError) as error:
        console.print(f"ops/bench engine: {error}", style="red", markup=False)
        return {"ok": False, "error": str(error)}


def _workload(name: str, arguments: argparse.Namespace) -> Workload:
    return generate(name, arguments.seed, arguments.share) if name in SHAPES else load(Path(name))


def _options(arguments: argparse.Namespace) -> EngineOptions:
    settings = {}
    for assignment in arguments.set:
        name, _, text = assignment.partition("=")
        try:
            settings[name] = json.loads(text)
        except json.JSONDecodeError:
            settings[name] = text
    return EngineOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        pool_tokens=arguments.pool_tokens,
        max_batch_tokens=arguments.max_batch_tokens,
        max_sequences=arguments.max_sequences,
        settings=settings,
    )


def _measure(arguments: argparse.Namespace, workloads: list[Workload], console: Console) -> dict[str, object]:
    options = _options(arguments)
    logs = Path(tempfile.mkdtemp(prefix="tokenmill-bench-"))
    names = [OURS, *dict.fromkeys(arguments.peer)]
    with ExitStack() as stack, console.status("starting the engines") as status:
        children = []
        for name in names:
            kind = _kind(name, options, status.update)
            child = Child(kind, _told(name, options), logs / f"{name}.log")
            stack.callback(child.close)
            child.wait_ready(status.update)
            console.print(f"{name}: {child.description} (loaded in {child.load_s:.1f} s)", markup=False)
            children.append(child)
        results = []
        for workload in workloads:
            rounds = _rounds(children, workload, arguments.rounds, status.update)
            results.append(_report(workload, rounds, console))
    strict = options.dtype == "float32" and "quantization" not in options.settings
    equal = all(result["equal"] for result in results)
    if strict and not equal:
        console.print("not every token is equal", style="red")
    return {"results": results, "ok": equal or not strict, "engines": {c.kind.name: c.description for c in children}}


def _kind(name: str, options: EngineOptions, waiting: Waiting) -> Kind:
    """Builds the peer's environment when it needs one of its own."""
    if name == OURS:
        return Kind(name, "ops.benchmarks.peers.ours")
    if name == "transformers":
        return Kind(name, "ops.benchmarks.peers.transformers_batching")
    threads = options.threads or os.cpu_count() or 1
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Kind(
        name,
        "ops.benchmarks.peers.vllm_engine",
        PeerEnvironment("vllm").ensure_vllm(waiting),
        tuple(environment.items()),
    )


def _told(name: str, options: EngineOptions) -> EngineOptions:
    """A peer in its own environment cannot resolve our names of models: it gets the folder."""
    if name != "vllm":
        return options
    from worker.engine.model.store import resolve

    return dataclasses.replace(options, model=str(resolve(options.model)), settings={})


def _rounds(children: list[Child], workload: Workload, count: int, waiting: Waiting) -> dict[str, list[Round]]:
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


def _report(workload: Workload, rounds: dict[str, list[Round]], console: Console) -> dict[str, object]:
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
    comparisons = {name: _compare(name, each, rounds, console) for name in rounds if name != OURS}
    return {
        "workload": workload.name,
        "requests": num_requests,
        "rounds": each,
        "summary": summaries,
        "comparisons": comparisons,
        "equal": all(c["equal_requests"] == num_requests for c in comparisons.values()),
    }


def _compare(
    peer: str, each: dict[str, list[dict[str, float]]], rounds: dict[str, list[Round]], console: Console
) -> dict[str, float]:
    """The ratio is the median of the rounds' ratios, which drift less than the figures themselves."""
    metric = "output_tok_s"
    ratios = [ours[metric] / theirs[metric] for ours, theirs in zip(each[OURS], each[peer], strict=True)]
    ratio = statistics.median(ratios)
    equal, total = equal_requests(rounds[OURS][0], rounds[peer][0])
    share = equal_tokens(rounds[OURS][0], rounds[peer][0])
    console.print(
        f"{OURS} / {peer}: {ratio:.2f} × (rounds: {', '.join(f'{r:.2f}' for r in ratios)}); "
        f"same tokens in {equal} of {total} requests ({share:.1%} of the tokens before a first difference)"
    )
    return {"ratio": ratio, "equal_requests": equal, "requests": total, "equal_tokens": share}


def _cell(value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{value['median']:,.1f} ± {value['spread']:.0%}"
