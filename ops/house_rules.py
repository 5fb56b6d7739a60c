"""What no linter knows: no source file is over 350 lines, and no file names the host of a package registry.

Packages come from whatever index the machine's pip is configured with, so a host in a file would be wrong
somewhere. Looks at the files that git tracks or would track.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 350
SOURCES = {".py", ".lua", ".c", ".cc", ".cpp", ".h", ".cu", ".sh"}
# Written in two parts, so that this file passes its own check.
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("conda", "anaconda", "org"),
        ("registry", "npmjs", "org"),
    )
)


def tracked_files(root: Path) -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [path for name in names.split("\0") if name and (path := root / name).is_file()]


def problems(path: Path, name: str) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return  # not text: nothing that these rules are about
    num_lines = text.count("\n")
    if path.suffix in SOURCES and num_lines > MAX_LINES:
        yield f"{name}: {num_lines} lines, {MAX_LINES} at most"
    for number, line in enumerate(text.splitlines(), 1):
        for host in REGISTRY_HOSTS:
            if host in line:
                yield f"{name}:{number}: names the registry host {host}"


def main(root: Path) -> int:
    found = [line for path in tracked_files(root) for line in problems(path, str(path.relative_to(root)))]
    print("\n".join(found) or "no problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
