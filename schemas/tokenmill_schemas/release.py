"""The version, and the revision that it was built from.

`0.1.0+g9fc2b2b7` tells two deployments of one version apart. setuptools calls `described` for both
distributions when it builds one; it imports this file alone. A checkout asks git when it runs. A
release, whose tag is `v0.1.0`, has the version alone.
"""

import os
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

BASE: Final = "0.1.0"
_FILE: Final = Path(__file__).resolve()


def version() -> str:
    """Return the version of this code: as it was installed, or of its checkout."""
    if _checkout() is not None:
        return described()
    for name in ("tokenmill", "tokenmill-client"):
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        if Path(str(installed.locate_file("tokenmill_schemas/release.py"))).resolve() == _FILE:
            return installed.version
    return BASE


def described() -> str:
    """Return BASE with the revision of the variable TOKENMILL_REVISION, or of this checkout. Where
    neither is known, BASE alone.
    """
    revision = os.environ.get("TOKENMILL_REVISION") or _git_describe()  # noqa: TID251 - at a build
    return with_revision(revision)


def with_revision(revision: str) -> str:
    """Return BASE with a revision in the form of `git describe --tags --always --dirty`."""
    words = re.sub(r"[^A-Za-z0-9]+", ".", revision.strip().removeprefix(f"v{BASE}")).strip(".")
    if re.fullmatch(r"[0-9a-f]{7,}(\.dirty)?", words):  # no tag
        words = f"g{words}"
    return f"{BASE}+{words}" if words else BASE


def _checkout() -> Path | None:
    """Return the root of the repository that this file is part of; None for an installed one."""
    root = _FILE.parents[2]
    return root if _FILE.parents[1].name == "schemas" and (root / ".git").exists() else None


def _git_describe() -> str:
    import subprocess  # takes time that `--help` does not need

    command = ["git", "describe", "--tags", "--match", "v[0-9]*", "--always", "--dirty"]
    if (root := _checkout()) is None:
        return ""
    try:
        done = subprocess.run(
            [*command, "--abbrev=8"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
