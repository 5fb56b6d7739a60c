"""`ops/bench plot FILE.json -o FILE.png`: draws the figures that another command measured."""

import argparse
import json
from pathlib import Path
from typing import Any

from ops.benchmarks import pictures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE.json", help=f"written by {', '.join(pictures.COMMANDS)}"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=".png, .svg or .pdf"
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    picture = pictures.draw(_read(arguments.file), arguments.output)
    print(picture)
    return {"picture": str(picture)}


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise pictures.PictureError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict) or "command" not in record:
        raise pictures.PictureError(f"{path} was not written by ops/bench … --json")
    return record
