"""`ops/bench workloads DIR`: writes the five workload files; the same seed gives the same bytes."""

import argparse
from pathlib import Path

from ops.benchmarks.measure.workload_files import SHAPES, generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--share", type=float, default=1.0, help="scale the number of requests (0.25: a quarter)"
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    arguments.directory.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in SHAPES:
        workload = generate(name, arguments.seed, arguments.share)
        path = arguments.directory / f"{name}.json"
        workload.save(path)
        files[name] = str(path)
        print(
            f"{path}: {len(workload.requests)} requests, {workload.num_prompt_tokens} prompt "
            "tokens, "
            f"{workload.num_output_tokens} output tokens"
        )
    return {"files": files}
