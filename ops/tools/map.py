"""Draws the map of rooms in ops/architecture.md from the imports.

`python ops/tools/map.py` rewrites the map between its two markers. `--check` only compares, and
returns 1 where the page differs from the tree. A room is a module or package directly below one of
the packages in `HOUSES`. Its line has the first sentence of its docstring and the rooms of the same
package that it imports. A room stands above every room that it imports.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "ops" / "architecture.md"
BEGIN, END = "<!-- map: begin (ops/tools/map.py) -->", "<!-- map: end -->"
# title, source root, package
HOUSES = (
    ("Worker", "worker", "tokenmill_worker"),
    ("Our engine, inside the worker", "worker", "tokenmill_worker.engines.own"),
    ("Gateway", "api_client", "tokenmill_gateway"),
    ("Client", "api_client", "tokenmill"),
    ("Schemas", "schemas", "tokenmill_schemas"),
)


def rooms_of(folder: Path) -> dict[str, list[Path]]:
    """Return the source files of each room of a package, by the room's name."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path / "__init__.py").exists():
            found[path.name] = sorted(path.rglob("*.py"))
        elif path.suffix == ".py" and not path.name.startswith("__"):
            found[path.stem] = [path]
    return found


def imported(path: Path) -> set[str]:
    """Return the dotted names that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def arrows(rooms: dict[str, list[Path]], package: str) -> dict[str, set[str]]:
    """Return for each room the other rooms of its package that it imports."""
    found: dict[str, set[str]] = {}
    for room, files in rooms.items():
        names = set().union(*map(imported, files))
        ours = (name.split(f"{package}.", 1)[1] for name in names if name.startswith(f"{package}."))
        found[room] = ({name.split(".")[0] for name in ours} & rooms.keys()) - {room}
    return found


def in_order(below: dict[str, set[str]]) -> list[str]:
    """Return the rooms from the top to the bottom; raises ValueError where rooms form a cycle."""
    floors: dict[str, int] = {}

    def floor(room: str, above: tuple[str, ...]) -> int:
        if room in above:
            raise ValueError(f"rooms import each other in a cycle: {' → '.join((*above, room))}")
        if room not in floors:
            floors[room] = 1 + max(
                (floor(other, (*above, room)) for other in below[room]), default=-1
            )
        return floors[room]

    return sorted(below, key=lambda room: (-floor(room, ()), room))


def sentence(files: list[Path]) -> str:
    """Return the first sentence of a room's docstring, in one line."""
    path = next((file for file in files if file.name == "__init__.py"), files[0])
    shortest = min(
        (file for file in files if file.name == path.name), key=lambda file: len(file.parts)
    )
    text = " ".join(
        (ast.get_docstring(ast.parse(shortest.read_text(encoding="utf-8"))) or "").split()
    )
    return text.partition(". ")[0].removesuffix(".")


def drawn() -> str:
    """Return the map: one table for each package, one line for each room."""
    parts = []
    for title, root, package in HOUSES:
        rooms = rooms_of(ROOT / root / Path(*package.split(".")))
        below = arrows(rooms, package)
        order = in_order(below)
        lines = [
            f"**{title}** (`{package}`)",
            "",
            "| room | what it does | imports |",
            "|---|---|---|",
        ]
        for room in order:
            names = ", ".join(f"`{name}`" for name in order if name in below[room]) or "–"
            lines.append(f"| `{room}` | {sentence(rooms[room])} | {names} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    wanted = f"{head}{BEGIN}\n{drawn()}\n{END}{tail}"
    if page == wanted:
        return 0
    if arguments == ["--check"]:
        print(
            "ops/architecture.md: the map of rooms is not that of the imports: python "
            "ops/tools/map.py"
        )
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    print("wrote the map of rooms in ops/architecture.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
