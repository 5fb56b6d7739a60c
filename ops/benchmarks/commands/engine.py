"""`ops/bench engine`: tokens per second and first tokens of the bare engine and its peers.

Engines alternate round by round, each in its own process, so that a drift of the machine's speed
affects all alike; the ratio is the result. Greedy float32 answers must be equal token by token.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.quiet import wait_until_quiet
from ops.benchmarks.measure.rounds import Measurement
from ops.benchmarks.measure.workloads import SHAPES, Workload, generate
from ops.benchmarks.peers.child import Child, ChildError, vllm_python
from tokenmill_worker.engines.own.model.model_files import resolve

OURS = "tokenmill"
WHOLE_WAY = "whole way"
VLLM = "vllm"
QUEUED_VLLM, SERVED_VLLM, CELERY = "vllm whole way", "vllm serve", "celery"
OF_VLLM = (QUEUED_VLLM, VLLM, SERVED_VLLM, CELERY)  # need its environment
# Our engine with other settings, whatever `--set` says; None is the default.
VARIANTS: dict[str, dict[str, object]] = {
    "unquantised": {"quantization": None},
    "wide": {"quantization": None, "narrow_weights": False},  # every weight as float32 in memory
    "no-prefix-cache": {"prefix_cache": False},
    "no-offload": {"cpu_offload_gib": None},
}
PEERS = {
    **dict.fromkeys(VARIANTS, "ours:Tokenmill"),
    "transformers": "transformers_engines:TransformersBatching",
    "static": "transformers_engines:StaticBatching",
    VLLM: "vllm_engine:Vllm",
}
_ENGINES = {
    **PEERS,
    OURS: "ours:Tokenmill",
    WHOLE_WAY: "whole_way:WholeWay",
    QUEUED_VLLM: "whole_way:WholeWay",
    SERVED_VLLM: "bridge:Bridge",
    CELERY: "bridge:Bridge",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        choices=PEERS,
        help="repeatable; static: Transformers' generate on padded batches; unquantised, wide "
        "(weights as float32 in memory), no-prefix-cache, no-offload: our engine set otherwise",
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    return compare(arguments, [OURS, *dict.fromkeys(arguments.peer)])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a comparison."""
    parser.add_argument(
        "--workload", action="append", choices=SHAPES, help="repeatable; default: decode"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="scale the number of requests")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
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


def compare(
    arguments: argparse.Namespace, names: Sequence[str], workloads: Sequence[Workload] = ()
) -> dict[str, Any]:
    """Measure these engines on the workloads, by default the arguments' own, and compare the first
    with each of the others.

    `arguments.keep` receives the results so far after every turn. An interrupted or failed run
    still shows its finished rounds. `arguments.logs`, if it is there, is a folder that keeps the
    engines' output. With `arguments.kills`, each part of a service is killed once after the rounds.
    """
    console = Console()
    record: dict[str, Any] = {"ok": False, "results": {}, "rounds": {}, "engines": {}}
    shapes = arguments.workload or ["decode"]
    try:
        with ExitStack() as stack:
            children = _start(arguments, names, stack)
            for name, child in children.items():
                child.wait_ready()
                said = f"{name}: {child.description} (loaded in {child.load_s:.1f} s)"
                console.print(said, markup=False)
                record["engines"][name] = child.description
            for workload in workloads or [generate(name, arguments.share) for name in shapes]:
                _measure(workload, children, arguments, record, console)
    except (ChildError, ValueError, OSError) as error:
        console.print(f"ops/bench: {error}", style="red", markup=False)
        return record | {"error": str(error)}
    record["ok"] = _is_equal(arguments, record["results"])
    if not record["ok"]:
        console.print("not every token is equal", style="red")
    return record


def _measure(
    workload: Workload,
    children: Mapping[str, Child],
    arguments: argparse.Namespace,
    record: dict[str, Any],
    console: Console,
) -> None:
    """Run all rounds of a workload, in an order that reverses from round to round.

    Keep each turn, and print what was finished.
    """
    measurement = Measurement(workload, tuple(children))
    for child in children.values():
        child.run(workload.first(4, 8))  # warms up

    def keep(line: str) -> None:
        record["results"][workload.name] = measurement.results()
        record["rounds"][workload.name] = measurement.rounds
        arguments.keep({**record, "complete": False})
        console.print(line, markup=False, soft_wrap=True)  # last: the file has what is printed

    try:
        for number in range(arguments.rounds):
            for name in measurement.names[:: -1 if number % 2 else 1]:
                wait_until_quiet()
                measurement.add(name, children[name].run(workload))
                keep(measurement.turn_line(name, arguments.rounds))
        for name, child in children.items():
            for part in child.parts if getattr(arguments, "kills", False) else ():
                measurement.kills[name][part] = child.kill(part, workload)
                keep(measurement.kill_line(name, part))
    finally:
        measurement.show(console)


def _is_equal(arguments: argparse.Namespace, results: dict[str, dict[str, Any]]) -> bool:
    """Return whether all tokens are equal that must be: greedy ones of float32 weights."""
    if arguments.dtype != "float32" or "quantization" in settings_of(arguments.set):
        return True
    found = [figures for engines in results.values() for figures in engines.values()]
    return all(figures.get("is_equal", True) for figures in found)


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


def _start(
    arguments: argparse.Namespace, names: Sequence[str], stack: ExitStack
) -> dict[str, Child]:
    """Start a process for each engine; the stack ends them, and the folder of their output.

    An error leaves that folder, since the output may say more.
    """
    fields = {field.name for field in dataclasses.fields(EngineOptions)} - {"settings"}
    given = {name: getattr(arguments, name) for name in fields}
    options = EngineOptions(**given, settings=settings_of(arguments.set))
    logs: Path | None = getattr(arguments, "logs", None)
    if logs is None:
        logs = Path(tempfile.mkdtemp(prefix="tokenmill-bench-"))
        stack.push(lambda kind, *_: None if kind else shutil.rmtree(logs, ignore_errors=True))
    children = {}
    for name in names:
        module, log = f"ops.benchmarks.peers.{_ENGINES[name]}", f"{name.replace(' ', '-')}.log"
        its = options_for(name, options)
        python = vllm_python() if name == VLLM else sys.executable
        children[name] = Child(name, module, its, logs / log, python)
        stack.callback(children[name].close)
    return children


def options_for(name: str, options: EngineOptions) -> EngineOptions:
    """Return the options for one engine.

    An engine of vLLM's environment cannot resolve our model names: it gets the files.
    """
    if name in OF_VLLM:
        settings: dict[str, object] = {"front": name, "python": vllm_python()}
        return dataclasses.replace(options, model=str(resolve(options.model)), settings=settings)
    given = {**options.settings, **VARIANTS.get(name, {})}
    given = {key: value for key, value in given.items() if value is not None}
    return dataclasses.replace(options, settings=given)
