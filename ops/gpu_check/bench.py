"""The bench stage: `ops/bench gpu` with the arguments given, then its results for the table."""

import json
import sys
from pathlib import Path
from typing import Any

from ops.benchmarks.__main__ import main as run_benchmarks
from ops.benchmarks.commands.gpu import COLUMNS


def rows(record: dict[str, Any]) -> list[str]:
    """Return a line for each measurement that has figures, and one for each left out."""
    lines = []
    for shape, found in record.get("results", {}).items():
        for what, figures in found.items():
            parts = [
                f"{heading} {form.format(figures[key])}"
                for key, (heading, form) in COLUMNS.items()
                if key in figures
            ]
            if parts:
                lines.append(f"{shape}, {what}: {', '.join(parts)}")
    lines += [f"left out: {what}: {why}" for what, why in record.get("left_out", {}).items()]
    return [*lines, record["error"]] if "error" in record else lines


def main(arguments: list[str]) -> int:
    file, *rest = arguments
    status = run_benchmarks(["gpu", *rest, "--json", file])
    if Path(file).exists():
        for line in rows(json.loads(Path(file).read_text())):
            print(f"| {line}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
