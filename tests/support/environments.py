"""Environments of Python that lack packages, beside the one that runs the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

# what the extra `engine` installs and the extra `worker` does not, by requirements either
OF_OUR_ENGINE: Final = ("torch", "xgrammar", "llguidance")
_SITE: Final = """\
import sys
from importlib.machinery import PathFinder


class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {lacking}:
            return None
        return super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking
"""


def without(folder: Path, *packages: str) -> dict[str, str]:
    """Return the variables of a process that finds none of the packages, nor do its children."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE.replace("{lacking}", repr(packages)), "utf-8")
    return {**os.environ, "PYTHONPATH": str(folder)}  # noqa: TID251 - handed on, not read


def whole_python(folder: Path) -> str:
    """Return a Python that finds every package, also if its parent does not."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} "$@"\n', "utf-8")
    path.chmod(0o755)
    return str(path)
