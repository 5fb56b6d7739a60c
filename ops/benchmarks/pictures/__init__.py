"""Draws what the commands measured, from the same record that `--json` writes.

matplotlib is imported when something is drawn; it comes with the extra `bench`.
"""

import importlib.util
from pathlib import Path
from typing import Any

COMMANDS = ("engine", "service", "queue")
FORMATS = (".png", ".svg", ".pdf")


class PictureError(ValueError):
    """Nothing can be drawn; one sentence for the user."""


def check(path: Path) -> None:
    """Check that the picture can be drawn, before a measurement starts."""
    if path.suffix not in FORMATS:
        raise PictureError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise PictureError(f"there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PictureError("drawing needs matplotlib: pip install '.[bench]' in tokenmill's folder")


def draw(record: dict[str, Any], path: Path) -> Path:
    check(path)
    command = record["command"]
    if command not in COMMANDS:
        raise PictureError(
            f"there is no picture of {command}; there is one of {', '.join(COMMANDS)}"
        )
    from ops.benchmarks.pictures import bars

    bars.figure_of(record).savefig(path, dpi=150)
    return path
