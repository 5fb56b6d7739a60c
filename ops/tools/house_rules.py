"""Checks what no linter checks: file length, modules in a package's root, the walk through the
code, the number of settings, cycles of imports, hosts of package registries, unsafe formats, plain
docstrings, comments that break a line.

A package's root stays small, because its modules are read first; the rest has rooms. The files of
README's "Read the code in this order" exist. A worker has at most 70 settings, those of all kinds
of engine included. No source file has over 350 lines, and no line of C++ or Lua over 100 columns.
No file imports itself through others, also inside one room and for types alone. No file names the
host of a package registry, because packages come from whatever index pip is configured with.
Nothing reads bytes in a format that can run code (pickle and its kin, `torch.load` of more than
weights). Every docstring opens with a verb or its subject, and not with a question. A comment
behind a closing bracket stands above the statement if the formatter broke that only to fit the
comment. All files that git tracks or would track are checked.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

MAX_LINES = 350
MAX_COLUMNS = 100  # of C++ and Lua; ruff checks Python
MAX_MODULES = {  # in the root of a package
    "worker/tokenmill_worker": 7,
    "worker/tokenmill_worker/engines/own": 9,
    "api_client/tokenmill": 6,
}
_WALK = re.compile(r"^## Read the code in this order$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
MAX_SETTINGS = 70
_SETTINGS = re.compile(r"worker/tokenmill_worker/(settings/fields|engines/\w+/config(/\w+)?)\.py")
SOURCES = {".py", ".lua", ".c", ".cc", ".cpp", ".h", ".cu", ".sh"}
# Written in parts, so that this file passes its own check.
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
RUNS_CODE = frozenset(
    {
        "pickle",
        "cPickle",
        "_pickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "jsonpickle",
        "joblib",
    }
)

# A docstring that opens with one of these leaves out its subject: "Of one engine.", "What is left
# of …", "Until …".
WITHOUT_SUBJECT = re.compile(
    r"[\W]*(after|among|as|at|because|before|between|by|for|from|here|how|in|nobody|none|now|of|on|since|so|than|there|those"
    r"|though|until|what|when|where|whether|which|while|who|whom|whose|why|with|without)\b",
    re.IGNORECASE,
)

# A line that begins with a closing bracket and has a comment for people at its end.
_BEHIND_BRACKET = re.compile(r"^( *)([)\]}][^\"'#\n]*)  # (?!fmt:|type:|noqa|pragma)", re.MULTILINE)


def tracked_files(root: Path) -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [path for name in names.split("\0") if name and (path := root / name).is_file()]


def problems(path: Path, name: str) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return  # a binary file, to which no rule applies
    num_lines = text.count("\n")
    if path.suffix in SOURCES and num_lines > MAX_LINES:
        yield f"{name}: {num_lines} lines, {MAX_LINES} at most"
    if path.suffix in SOURCES - {".py", ".sh"}:
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                yield f"{name}:{number}: {len(line)} columns, {MAX_COLUMNS} at most"
    if path.suffix == ".py":
        yield from (f"{name}:{line}: {what}" for line, what in python_problems(text))
    for number, line in enumerate(text.splitlines(), 1):
        for host in REGISTRY_HOSTS:
            if host in line:
                yield f"{name}:{number}: names the registry host {host}"


def python_problems(source: str) -> Iterator[tuple[int, str]]:
    yield from dangerous_reads(source)
    yield from docstrings_without_subject(source)
    yield from lines_broken_by_comments(source)


def dangerous_reads(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for each import and call that could run code from outside bytes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [item.name for item in node.names]
            )
            found = [module for module in modules if module.split(".")[0] in RUNS_CODE]
            yield from (
                (node.lineno, f"imports {module}, which runs what it reads") for module in found
            )
        elif isinstance(node, ast.Call):
            keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
            called = ast.unparse(node.func)
            if called == "torch.load" and keywords.get("weights_only") != "True":
                yield node.lineno, "calls torch.load without weights_only=True"
            if keywords.get("allow_pickle", "False") != "False":
                yield node.lineno, f"calls {called} with allow_pickle"
            if called == "__import__" or (called == "importlib.import_module" and node.args):
                module = ast.unparse(node.args[0]).strip("'\"")
                if module.split(".")[0] in RUNS_CODE:
                    yield node.lineno, f"imports {module}, which runs what it reads"


def docstrings_without_subject(source: str) -> Iterator[tuple[int, str]]:
    """(line, sentence) of each docstring that opens with a preposition, a pronoun or a relative
    word.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            opening = WITHOUT_SUBJECT.match(ast.get_docstring(node) or "")
            if opening:
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield (
                    line,
                    f"a docstring opens with {opening[1]!r}: begin with a verb or the subject",
                )
            elif re.match(r"[^.:(]*\?", ast.get_docstring(node) or ""):
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield line, "a docstring opens with a question: say 'Return whether'"


def lines_broken_by_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (first line, problem) of what fits in one line without the comment behind its closing
    bracket, for which the formatter broke it.
    """
    lines = source.splitlines()
    for behind in _BEHIND_BRACKET.finditer(source):
        last = source.count("\n", 0, behind.start()) + 1
        indent, end = behind[1], behind[2]
        parts = [end]
        first = last - 1
        while first and (
            lines[first - 1].startswith(f"{indent} ") or lines[first - 1].lstrip()[:1] in ")]}"
        ):
            parts.insert(0, lines[first - 1].strip())
            first -= 1
        parts.insert(0, lines[first - 1].strip())
        joined = _joined(parts)
        if len(indent + joined) <= MAX_COLUMNS and not any("#" in part for part in parts):
            yield first, f"only the comment on line {last} breaks this line: put it above"


def _joined(parts: list[str]) -> str:
    line = parts[0]
    for part in parts[1:]:
        if part[0] in ")]}":
            line = line.removesuffix(",") + part
        else:
            line += part if line[-1] in "([{" else f" {part}"
    return line


def large_roots(names: list[str]) -> Iterator[str]:
    """Yield the packages whose root has more modules than it may, given all files' paths."""
    for folder, most in MAX_MODULES.items():
        modules = [name for name in names if re.fullmatch(rf"{folder}/\w+\.py", name)]
        if len(modules) > most:
            yield f"{folder}: {len(modules)} modules, {most} at most: move some to a room"


def settings_of(sources: dict[str, str]) -> set[str]:
    """Return the names of all settings, given the sources by path: the fields that have a help
    text, as `Field` and `setting` give them.
    """
    return {
        node.target.id
        for name, source in sources.items()
        if _SETTINGS.fullmatch(name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and re.match(r"(Field|setting)\(|field\(metadata={'help'", ast.unparse(node.value or node))
    }


def import_cycle(sources: dict[str, str]) -> Iterator[str]:
    """Yield the first cycle of imports among Python files, given each file's text by its path.

    Imports inside functions and for type checkers count. A file does not import the packages that
    it stands in by importing a module of theirs. Relative imports are refused by ruff.
    """
    modules = {}
    for name in sources:
        dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        modules[re.sub(r"^(worker|api_client|schemas|migrations)\.(?=tokenmill)", "", dotted)] = (
            name
        )
    graph = {}
    for name, source in sources.items():
        imported = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported |= {item.name for item in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{item.name}" for item in node.names]
                imported |= {full if full in modules else node.module for full in inner}
        graph[name] = {modules[module] for module in imported if module in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"files import each other in a cycle: {' ← '.join(error.args[1])}"


def broken_walk(readme: str, root: Path) -> Iterator[str]:
    """Yield the files of the walk through the code that do not exist.

    Args:
        readme: the text of README.md, which names the files, one in each line of a block.
        root: the folder to which their paths are relative.
    """
    walk = _WALK.search(readme)
    names = re.findall(r"^(\w+/\S+) ", walk[1], re.MULTILINE) if walk else []
    if not names:
        yield "README.md: names no files to read first"
    for name in names:
        if not (root / name).is_file():
            yield f"README.md: the file to read {name} does not exist"


def main(root: Path) -> int:
    paths = {str(path.relative_to(root)): path for path in tracked_files(root)}
    found = [line for name, path in paths.items() for line in problems(path, name)]
    found += large_roots(list(paths))
    sources = {n: path.read_text("utf-8") for n, path in paths.items() if path.suffix == ".py"}
    found += import_cycle(sources)
    if (count := len(settings_of(sources))) > MAX_SETTINGS:
        found.append(f"worker: {count} settings, {MAX_SETTINGS} at most: derive or fix some")
    found += broken_walk((root / "README.md").read_text(encoding="utf-8"), root)
    print("\n".join(found) or "no problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
