"""Command line of the benchmarks: finds a command's module, runs it and writes its JSON.

A module is imported only when its command is chosen, so that listing the commands needs no torch.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from types import ModuleType

COMMANDS = {
    "engine": "the bare engine: tokens/s and first tokens, beside --peer NAME",
    "service": "the service (Valkey, log, pub/sub, SQL) beside the bare engine",
    "bulk": "what a bulk file costs the interactive jobs beside it",
    "affinity": "what sessions save when two workers answer chats",
    "backlog": "what a claim and a submit cost with a million jobs waiting",
    "gateway": "what OpenAI's API costs beside the client alone",
    "start": "from the start of a worker's process to a first token",
    "restart": "first tokens behind what an earlier engine left on disk",
    "quality": "what rounding weights, keys and values costs: perplexity",
    "simulate": "how many workers one queue server carries; days of a fleet",
    "gpu": "share of the floor that the engine reaches on a CUDA device",
}


def main(arguments: list[str] | None = None) -> int:
    argv = sys.argv[1:] if arguments is None else arguments
    listing = "\n".join(f"  {name:<14}{what}" for name, what in COMMANDS.items())
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: ops/bench COMMAND …, ops/bench COMMAND --help\n\n{listing}")
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        print(f"ops/bench: no command {name}; there are:\n{listing}", file=sys.stderr)
        return 2
    module = _load(name)
    parser = argparse.ArgumentParser(prog=f"ops/bench {name}", description=COMMANDS[name])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    module.add_arguments(parser)
    options = parser.parse_args(rest)
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, Python {here['python']}")
    head = {"command": name, "arguments": rest, "machine": here, "at": time.time()}
    options.keep = lambda partial: _write(options.json, {**head, **partial})
    try:
        result = module.run(options)
    except KeyboardInterrupt:
        print("ops/bench: interrupted", file=sys.stderr)
        return 130
    options.keep(result)
    return 0 if result.get("ok", True) else 1


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"ops.benchmarks.commands.{name}")


def _write(path: Path | None, record: dict[str, object]) -> None:
    """Replace the file atomically, so that an interrupted run leaves a complete file."""
    if path is not None:
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(record, indent=1), encoding="utf-8")
        beside.replace(path)


def machine() -> dict[str, object]:
    """Return what to record with figures: CPU, number of cores, Python version and system."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


if __name__ == "__main__":
    sys.exit(main())
