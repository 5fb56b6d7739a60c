"""Shared part of `engine` and `service`: options, engines as child processes, rounds, equal tokens.

Engines alternate round by round, each in its own process, so that a drift of the machine's speed
affects all alike; the ratio is the result. Greedy float32 answers must be equal token by token.
"""

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from ops.benchmarks.compare.journal import Journal
from ops.benchmarks.compare.rounds import Measurement, run_rounds
from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.workload_files import SHAPES, Workload, generate, load
from ops.benchmarks.peers.child import Child, ChildError, Kind
from ops.benchmarks.peers.environments import BuildError, PeerEnvironment, Waiting

OURS = "tokenmill"
WHOLE_WAY = "whole way"
VLLM = "vllm"
UNQUANTISED = "unquantised"  # our engine, whatever `--set quantization` says
WIDE = "wide"  # ours, with every weight as float32 in memory
_MODULES = {
    OURS: "ours",
    WHOLE_WAY: "whole_way",
    UNQUANTISED: "ours",
    WIDE: "ours",
    "transformers": "transformers_batching",
    VLLM: "vllm_engine",
}
QUANTIZATION = "quantization"
FLOOR = "floor"  # followed by the kind of its linear layers


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
    parser.add_argument(
        "--share", type=float, default=1.0, help="scale the number of requests of generated shapes"
    )
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
    """Measure these engines and compare the first with each of the others.

    `arguments.keep` receives the results so far after every turn. An interrupted or failed run
    still shows its finished rounds.
    """
    console = Console()
    journal = Journal(console, arguments.keep, arguments.rounds)
    try:
        workloads = [_workload(name, arguments) for name in arguments.workload or ["decode"]]
        outcome = _measure(arguments, names, workloads, journal, console)
    except (BuildError, ChildError, ValueError, OSError) as error:
        console.print(f"ops/bench: {error}", style="red", markup=False)
        outcome = {"ok": False, "error": str(error)}
    finally:
        journal.close()
    return {**journal.results, **outcome}


def _workload(name: str, arguments: argparse.Namespace) -> Workload:
    return generate(name, arguments.seed, arguments.share) if name in SHAPES else load(Path(name))


def settings_of(assignments: Iterable[str]) -> dict[str, object]:
    """Parse assignments NAME=VALUE; a value that is not JSON is text."""
    settings: dict[str, object] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        try:
            settings[name] = json.loads(text)
        except json.JSONDecodeError:
            settings[name] = text
    return settings


def _options(arguments: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        pool_tokens=arguments.pool_tokens,
        max_batch_tokens=arguments.max_batch_tokens,
        max_sequences=arguments.max_sequences,
        settings=settings_of(arguments.set),
    )


def _measure(
    arguments: argparse.Namespace,
    names: Sequence[str],
    workloads: list[Workload],
    journal: Journal,
    console: Console,
) -> dict[str, object]:
    options = _options(arguments)
    logs = Path(
        tempfile.mkdtemp(prefix="tokenmill-bench-")
    )  # removed at the end; an error leaves them
    with ExitStack() as stack, console.status("starting the engines") as status:
        children = []
        for name in names:
            kind = _kind(name, options, status.update)
            child = Child(
                kind,
                options_for(name, options, status.update),
                logs / f"{name.replace(' ', '-')}.log",
            )
            stack.callback(child.close)
            child.wait_ready(status.update)
            console.print(
                f"{name}: {child.description} (loaded in {child.load_s:.1f} s)", markup=False
            )
            journal.engines[name] = child.description
            children.append(child)
        for workload in workloads:
            quantization = str(options.settings.get(QUANTIZATION, ""))
            measurement = Measurement(
                workload, tuple(names), frozenset(filter(is_floor, names)), quantization
            )
            run_rounds(
                children, measurement, arguments.rounds, status.update, journal.begin(measurement)
            )
            journal.show()
    shutil.rmtree(logs, ignore_errors=True)
    strict = options.dtype == "float32" and QUANTIZATION not in options.settings
    if strict and not journal.is_equal:
        console.print("not every token is equal", style="red")
    return {"ok": journal.is_equal or not strict}


def is_floor(name: str) -> bool:
    return name.startswith(f"{FLOOR} ")


def _kind(name: str, options: EngineOptions, waiting: Waiting) -> Kind:
    """Return how to run an engine; builds the peer's environment if it needs one of its own."""
    module = f"ops.benchmarks.peers.{FLOOR if is_floor(name) else _MODULES[name]}"
    if name != VLLM:
        return Kind(name, module)
    threads = options.threads or os.cpu_count() or 1
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Kind(
        name, module, PeerEnvironment(name).ensure_vllm(waiting), tuple(environment.items())
    )


def options_for(name: str, options: EngineOptions, waiting: Waiting) -> EngineOptions:
    """Return the options for one engine.

    vLLM runs in an environment of its own and cannot resolve our model names: it gets the folder.
    """
    if is_floor(name):
        return dataclasses.replace(
            options, settings={**options.settings, FLOOR: name.removeprefix(f"{FLOOR} ")}
        )
    if name in (UNQUANTISED, WIDE):
        kept = {key: value for key, value in options.settings.items() if key != QUANTIZATION}
        return dataclasses.replace(
            options, settings={**kept, "narrow_weights": False} if name == WIDE else kept
        )
    if name != VLLM:
        return options
    from tokenmill_worker.engine.model.model_files import resolve

    return dataclasses.replace(options, model=str(resolve(options.model)), settings={})
