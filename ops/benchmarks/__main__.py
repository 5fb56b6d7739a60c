"""Command line of the benchmarks: finds a command's module, runs it and writes its JSON.

A module is imported only when its command is chosen, so that listing the commands needs no torch.
"""

import argparse
import importlib
import json
import math
import os
import platform
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

COMMANDS = {
    "engine": "the bare engine: tokens/s and first tokens, beside --peer NAME",
    "service": "the service (Valkey, log, pub/sub, SQL) beside the bare engine",
    "queue": "the queue alone, model-free: jobs/s, memory (--peer celery|arq)",
    "bulk": "what a bulk file costs the interactive jobs beside it",
    "interference": "what a long prompt costs running streams and a short prompt",
    "scheduler": "the cost of one plan and commit, by batch and by backlog",
    "drafts": "what drafts of forced tokens or of a model save, and cost",
    "quality": "what rounding weights, keys and values costs: perplexity",
    "simulate": "policies in virtual time; what one queue server carries",
    "gpu": "share of the floor that the engine reaches on a CUDA device",
}


def main(arguments: list[str] | None = None) -> int:
    argv = sys.argv[1:] if arguments is None else arguments
    listing = "\n".join(f"  {name:<14}{what}" for name, what in COMMANDS.items())
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: ops/bench COMMAND …, ops/bench COMMAND --help\n\n{listing}")
        return 0 if argv else 2
    name = argv[0]
    if name not in COMMANDS:
        print(f"ops/bench: no command {name}; there are:\n{listing}", file=sys.stderr)
        return 2
    module = _load(name)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(module, name, argv[1:])
    finally:
        signal.signal(signal.SIGTERM, before)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"ops.benchmarks.commands.{name}")


class _Parser(argparse.ArgumentParser):
    """Rejects an `int` option below 1, unless its default is 0.

    A default of 0 has a meaning of its own (a seed, all threads), so such an option accepts any
    integer.
    """

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        if options.get("type") is int and options.get("default") != 0:
            options["type"] = _count
        return super().add_argument(*names, **options)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def _run(module: ModuleType, name: str, argv: list[str]) -> int:
    parser = _Parser(prog=f"ops/bench {name}", description=COMMANDS[name])
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    module.add_arguments(parser)
    options = parser.parse_args(argv)
    head = {"command": name, "arguments": argv, "machine": machine(), "at": time.time()}
    options.keep = lambda partial: _write(options.json, {**head, **partial})
    try:
        result = module.run(options)
        _write(options.json, {**head, **result})
    except KeyboardInterrupt:
        print("ops/bench: interrupted", file=sys.stderr)
        return 130
    return 0 if result.get("ok", True) else 1


def _write(target: str | None, record: dict[str, object]) -> None:
    """Replace the file atomically, so that an interrupted run leaves a complete file."""
    if target is None:
        return
    path = Path(target)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(_finite(record), indent=1, allow_nan=False), encoding="utf-8")
    beside.replace(path)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON has neither: a value that never came is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def machine() -> dict[str, object]:
    """Return what to record with figures: CPU, number of cores, Python version and system."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": model,
        "cores": cores,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
