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

from ops.benchmarks.compare.report import Report
from ops.benchmarks.compare.rounds import FLOOR, Measurement, run_rounds
from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.workload_files import SHAPES, Workload, generate, load
from ops.benchmarks.peers.child import Child, ChildError, Kind
from ops.benchmarks.peers.environments import VLLM_PACKAGE, BuildError, PeerEnvironment, Waiting
from tokenmill_worker.engine.model.model_files import BUILT_IN, resolve

OURS = "tokenmill"
WHOLE_WAY = "whole way"
VLLM = "vllm"
LLAMACPP = "llamacpp"  # it rounds activations, so its tokens may differ
STATIC = "static"  # Transformers' generate on padded batches
XLLAMACPP_PACKAGE = "xllamacpp==2026.10.11549"
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
    **dict.fromkeys(VARIANTS, "ours"),
    "transformers": "transformers_batching",
    STATIC: "static_batching",
    VLLM: "vllm_engine",
    LLAMACPP: "llamacpp_server",
    FLOOR: "floor",
}
PEERS = tuple(name for name in _MODULES if name not in (OURS, WHOLE_WAY))


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
    still shows its finished rounds. `arguments.logs`, if it is there, is a folder that keeps the
    engines' output.
    """
    console = Console()
    report = Report(console, arguments.keep, arguments.rounds)
    outcome: dict[str, object] = {"ok": False}
    try:
        workloads = [_workload(name, arguments) for name in arguments.workload or ["decode"]]
        _measure(arguments, names, workloads, report, console)
        outcome["ok"] = _is_equal(arguments, report)
    except (BuildError, ChildError, ValueError, OSError) as error:
        console.print(f"ops/bench: {error}", style="red", markup=False)
        outcome["error"] = str(error)
    finally:
        report.close()
    if not outcome["ok"] and "error" not in outcome:
        console.print("not every token is equal", style="red")
    return {**report.record, **outcome}


def _is_equal(arguments: argparse.Namespace, report: Report) -> bool:
    """Return whether all tokens are equal that must be: greedy ones of float32 weights."""
    if arguments.dtype != "float32" or "quantization" in settings_of(arguments.set):
        return True
    return report.is_equal(lambda name: name != LLAMACPP)


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
    report: Report,
    console: Console,
) -> None:
    options = _options(arguments)
    kept: Path | None = getattr(arguments, "logs", None)
    # removed at the end; an error leaves them
    logs = kept or Path(tempfile.mkdtemp(prefix="tokenmill-bench-"))
    with ExitStack() as stack, console.status("starting the engines") as status:
        children = []
        for name in names:
            kind = _kind(name, options, status.update)
            child = Child(kind, options_for(name, options), logs / f"{name.replace(' ', '-')}.log")
            stack.callback(child.close)
            children.append(child)
        for name, child in zip(names, children, strict=True):
            child.wait_ready(status.update)
            console.print(
                f"{name}: {child.description} (loaded in {child.load_s:.1f} s)", markup=False
            )
            report.engines[name] = child.description
        for workload in workloads:
            measurement = Measurement(workload, tuple(names))
            print_turn = report.begin(measurement)
            run_rounds(children, measurement, arguments.rounds, status.update, print_turn)
            report.show()
    if kept is None:
        shutil.rmtree(logs, ignore_errors=True)


def _kind(name: str, options: EngineOptions, waiting: Waiting) -> Kind:
    """Return how to run an engine; builds the peer's environment if it needs one of its own."""
    module = f"ops.benchmarks.peers.{_MODULES[name]}"
    if name == LLAMACPP:
        return Kind(name, module, PeerEnvironment(name).ensure([XLLAMACPP_PACKAGE], waiting))
    if name != VLLM:
        return Kind(name, module)
    threads = options.threads or os.cpu_count() or 1
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    python = PeerEnvironment(name).ensure([VLLM_PACKAGE], waiting)
    return Kind(name, module, python, tuple(environment.items()))


def options_for(name: str, options: EngineOptions) -> EngineOptions:
    """Return the options for one engine.

    Peers in an environment of their own cannot resolve our model names: they get the files.
    """
    if name == LLAMACPP:
        return dataclasses.replace(options, model=_gguf_of(options.model), settings={})
    if name == VLLM:
        return dataclasses.replace(options, model=str(resolve(options.model)), settings={})
    settings = {**options.settings, **VARIANTS.get(name, {})}
    given = {key: value for key, value in settings.items() if value is not None}
    return dataclasses.replace(options, settings=given)


def _gguf_of(model: str) -> str:
    """Return the GGUF file of a model; raises ValueError if it has not one."""
    files = [str(path) for path in BUILT_IN[model].files()] if model in BUILT_IN else [model]
    if len(files) > 1 or not files[0].endswith(".gguf"):
        raise ValueError(f"llama.cpp needs a model of one GGUF file, which {model} is not")
    return files[0]
