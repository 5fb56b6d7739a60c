"""Shared part of `engine` and `service`: options, engines as child processes, rounds, equal tokens.

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

from ops.benchmarks.compare.report import kill_line, show_results, turn_line
from ops.benchmarks.compare.rounds import FLOOR, Measurement
from ops.benchmarks.measure.disturbance import CoreWatch, wait_until_quiet
from ops.benchmarks.measure.figures import alternate
from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.workload_files import SHAPES, Workload, generate, load
from ops.benchmarks.peers.child import Child, ChildError
from ops.benchmarks.peers.environments import BuildError, Waiting, vllm_python
from tokenmill_worker.engines.own.model.model_files import resolve

OURS = "tokenmill"
WHOLE_WAY = "whole way"
VLLM = "vllm"
QUEUED_VLLM, SERVED_VLLM, CELERY = "vllm whole way", "vllm serve", "celery"
OF_VLLM = (QUEUED_VLLM, VLLM, SERVED_VLLM, CELERY)  # not in our environment
STATIC = "static"  # Transformers' generate on padded batches
# Our engine with other settings, whatever `--set` says; None is the default.
VARIANTS: dict[str, dict[str, object]] = {
    "unquantised": {"quantization": None},
    "wide": {"quantization": None, "narrow_weights": False},  # every weight as float32 in memory
    "no-prefix-cache": {"prefix_cache": False},
    "no-offload": {"cpu_offload_gib": None},
}
_MODULES = {
    OURS: "ours",
    WHOLE_WAY: "whole_way",
    QUEUED_VLLM: "whole_way",
    SERVED_VLLM: "bridge",
    CELERY: "bridge",
    **dict.fromkeys(VARIANTS, "ours"),
    "transformers": "transformers_batching",
    STATIC: "static_batching",
    VLLM: "vllm_engine",
    FLOOR: "floor",
}
PEERS = tuple(
    name for name in _MODULES if name not in (OURS, WHOLE_WAY, QUEUED_VLLM, SERVED_VLLM, CELERY)
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="FILE",
        help=f"a workload file or a shape ({', '.join(SHAPES)}); repeatable; default: decode",
    )
    parser.add_argument("--rounds", type=int, default=3)
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
    try:
        wanted = arguments.workload or ["decode"]
        workloads = workloads or [_workload(name, arguments) for name in wanted]
        with ExitStack() as stack, console.status("starting the engines") as status:
            children = _start(arguments, names, stack, status.update)
            for name, child in children.items():
                child.wait_ready(status.update)
                said = f"{name}: {child.description} (loaded in {child.load_s:.1f} s)"
                console.print(said, markup=False)
                record["engines"][name] = child.description
            for workload in workloads:
                _measure(workload, children, arguments, record, console, status.update)
    except (BuildError, ChildError, ValueError, OSError) as error:
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
    waiting: Waiting,
) -> None:
    """Run all rounds of a workload, keep each turn, and print what was finished."""
    measurement = Measurement(workload, tuple(children))
    for name, child in children.items():
        waiting(f"{workload.name}: {name} warms up")
        child.run(workload.first(4, 8))

    def keep() -> None:
        record["results"][workload.name] = measurement.results()
        record["rounds"][workload.name] = measurement.rounds
        arguments.keep({**record, "complete": False})

    def turn(name: str, number: int) -> dict[str, float]:
        waiting(f"{workload.name}: round {number + 1} of {arguments.rounds}, {name}")
        wait_until_quiet()
        watch = CoreWatch(children[name].pid)
        measured = children[name].run(workload)
        figures = measurement.add(name, measured, others_share=watch.others_share())
        keep()  # before it is printed, so that the file has every printed turn
        line = turn_line(measurement, name, arguments.rounds)
        console.print(line, markup=False, soft_wrap=True)
        return figures

    try:
        alternate(measurement.names, arguments.rounds, turn)
        for name, child in children.items():
            for part in child.parts if getattr(arguments, "kills", False) else ():
                waiting(f"{workload.name}: {name}, kill -9 of the {part}")
                measurement.kills[name][part] = child.kill(part, workload)
                keep()
                console.print(kill_line(measurement, name, part), markup=False)
    finally:
        show_results(measurement, console)


def _is_equal(arguments: argparse.Namespace, results: dict[str, dict[str, Any]]) -> bool:
    """Return whether all tokens are equal that must be: greedy ones of float32 weights."""
    if arguments.dtype != "float32" or "quantization" in settings_of(arguments.set):
        return True
    return all(
        figures.get("is_equal", True)
        for engines in results.values()
        for figures in engines.values()
    )


def _workload(name: str, arguments: argparse.Namespace) -> Workload:
    return generate(name, arguments.share) if name in SHAPES else load(Path(name))


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
    names = {field.name for field in dataclasses.fields(EngineOptions)} - {"settings"}
    given = {name: getattr(arguments, name) for name in names}
    return EngineOptions(**given, settings=settings_of(arguments.set))


def _start(
    arguments: argparse.Namespace, names: Sequence[str], stack: ExitStack, waiting: Waiting
) -> dict[str, Child]:
    """Start a process for each engine; the stack ends them, and the folder of their output.

    An error leaves that folder, since the output may say more.
    """
    options = _options(arguments)
    logs: Path | None = getattr(arguments, "logs", None)
    if logs is None:
        logs = Path(tempfile.mkdtemp(prefix="tokenmill-bench-"))
        stack.push(lambda kind, *_: None if kind else shutil.rmtree(logs, ignore_errors=True))
    children = {}
    for name in names:
        log = logs / f"{name.replace(' ', '-')}.log"
        children[name] = _child(name, options, log, waiting)
        stack.callback(children[name].close)
    return children


def _child(name: str, options: EngineOptions, log: Path, waiting: Waiting) -> Child:
    """Start an engine's process; builds the peer's environment if it needs one of its own."""
    module, given = f"ops.benchmarks.peers.{_MODULES[name]}", options_for(name, options)
    if name not in OF_VLLM:
        return Child(name, module, given, log)
    python = vllm_python(waiting)
    given.settings["python"] = str(python)
    return Child(name, module, given, log, python if name == VLLM else Path(sys.executable))


def options_for(name: str, options: EngineOptions) -> EngineOptions:
    """Return the options for one engine.

    Peers in an environment of their own cannot resolve our model names: they get the files.
    """
    if name in OF_VLLM:
        model = str(resolve(options.model))
        return dataclasses.replace(options, model=model, settings={"front": name})
    settings = {**options.settings, **VARIANTS.get(name, {})}
    given = {key: value for key, value in settings.items() if value is not None}
    return dataclasses.replace(options, settings=given)
