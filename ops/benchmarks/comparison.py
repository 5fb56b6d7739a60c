"""What `engine` and `service` share: the options, engines as children, rounds in turn, and whether the tokens agree.

Engines alternate round by round, each in its own process, so that a machine whose speed drifts treats
all alike; what counts is the ratio. Greedy float32 answers must be equal, token for token.
"""

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from ops.benchmarks.peers.child import Child, ChildError, Kind
from ops.benchmarks.peers.environments import BuildError, PeerEnvironment, Waiting
from ops.benchmarks.peers.protocol import EngineOptions
from ops.benchmarks.report import report, run_rounds
from ops.benchmarks.workload_files import SHAPES, Workload, generate, load

OURS = "tokenmill"
WHOLE_WAY = "whole way"
_MODULES = {
    OURS: "ours",
    WHOLE_WAY: "whole_way",
    "transformers": "transformers_batching",
    "vllm": "vllm_engine",
}
FLOOR = "floor"  # with the kind of its linear layers after it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="FILE",
        help=f"a workload file or a shape ({', '.join(SHAPES)}); repeatable; default: decode",
    )
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


def compare(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, object]:
    """Measure these engines; the first is compared with each of the others."""
    console = Console()
    try:
        workloads = [_workload(name, arguments) for name in arguments.workload or ["decode"]]
        return _measure(arguments, names, workloads, console)
    except (BuildError, ChildError, ValueError, OSError) as error:
        console.print(f"ops/bench: {error}", style="red", markup=False)
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


def _measure(
    arguments: argparse.Namespace, names: Sequence[str], workloads: list[Workload], console: Console
) -> dict[str, object]:
    options = _options(arguments)
    logs = Path(tempfile.mkdtemp(prefix="tokenmill-bench-"))  # stays where it helps: after an error
    with ExitStack() as stack, console.status("starting the engines") as status:
        children = []
        for name in names:
            kind = _kind(name, options, status.update)
            child = Child(kind, _told(name, options), logs / f"{name.replace(' ', '-')}.log")
            stack.callback(child.close)
            child.wait_ready(status.update)
            console.print(f"{name}: {child.description} (loaded in {child.load_s:.1f} s)", markup=False)
            children.append(child)
        results = []
        for workload in workloads:
            rounds = run_rounds(children, workload, arguments.rounds, status.update)
            results.append(report(workload, rounds, console, frozenset(filter(is_floor, names))))
    shutil.rmtree(logs, ignore_errors=True)
    strict = options.dtype == "float32" and "quantization" not in options.settings
    equal = all(result["equal"] for result in results)
    if strict and not equal:
        console.print("not every token is equal", style="red")
    return {"results": results, "ok": equal or not strict, "engines": {c.kind.name: c.description for c in children}}


def is_floor(name: str) -> bool:
    return name.startswith(f"{FLOOR} ")


def _kind(name: str, options: EngineOptions, waiting: Waiting) -> Kind:
    """Builds the peer's environment when it needs one of its own."""
    module = f"ops.benchmarks.peers.{FLOOR if is_floor(name) else _MODULES[name]}"
    if name != "vllm":
        return Kind(name, module)
    threads = options.threads or os.cpu_count() or 1
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Kind(name, module, PeerEnvironment("vllm").ensure_vllm(waiting), tuple(environment.items()))


def _told(name: str, options: EngineOptions) -> EngineOptions:
    """A peer in its own environment cannot resolve our names of models: it gets the folder."""
    if is_floor(name):
        return dataclasses.replace(options, settings={**options.settings, FLOOR: name.removeprefix(f"{FLOOR} ")})
    if name != "vllm":
        return options
    from worker.engine.model.store import resolve

    return dataclasses.replace(options, model=str(resolve(options.model)), settings={})
