"""The repository's own rules, and that they can fail."""

from pathlib import Path

import pytest

from ops.tools.house_rules import (
    MAX_MODULES,
    MAX_SETTINGS,
    REGISTRY_HOSTS,
    broken_walk,
    dangerous_reads,
    docstrings_without_subject,
    import_cycle,
    large_roots,
    lines_broken_by_comments,
    problems,
    settings_of,
)
from tokenmill_worker.settings import Settings


def test_a_registry_host_is_found(tmp_path: Path) -> None:
    path, host = tmp_path / "pip.conf", REGISTRY_HOSTS[0]  # no file may name one, this one neither
    path.write_text(f"[global]\nindex = https://{host}/simple\n")
    assert list(problems(path, "pip.conf")) == [f"pip.conf:2: names the registry host {host}"]


def test_a_source_of_351_lines_is_found(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("x = 1\n" * 350)
    assert list(problems(path, "long.py")) == []
    path.write_text("x = 1\n" * 351)
    assert list(problems(path, "long.py")) == ["long.py: 351 lines, 350 at most"]


def test_every_setting_is_counted_once_and_nothing_else() -> None:
    root = Path(__file__).parents[2]
    sources = {
        str(path.relative_to(root)): path.read_text() for path in root.glob("worker/**/*.py")
    }
    assert settings_of(sources) == set(Settings.model_fields)
    assert len(Settings.model_fields) <= MAX_SETTINGS
    engine = "worker/tokenmill_worker/engines/other/config.py"
    more = settings_of(
        sources | {engine: 'class C:\n    a: int = setting(1, "help")\n    b: int = 2'}
    )
    assert more == {*Settings.model_fields, "a"}


def test_large_roots_are_found() -> None:
    folder, most = next(iter(MAX_MODULES.items()))
    names = [f"{folder}/part_{number}.py" for number in range(most)]
    assert list(large_roots([*names, f"{folder}/room/part.py", f"{folder}/notes.md"])) == []
    (found,) = large_roots([*names, f"{folder}/more.py"])
    assert found == f"{folder}: {most + 1} modules, {most} at most: move some to a room"


@pytest.mark.parametrize(
    "broken",
    [
        "pair = (\n    0,\n    0.0,\n)  # the first and the last\n",
        "try:\n    run()\nexcept (\n    OSError\n) as e:  # away\n    raise\n",
        "if seen[\n    0\n] and f(\n    1, 2\n):  # again\n    pass\n",
    ],
)
def test_a_line_that_only_its_comment_breaks_is_found(broken: str) -> None:
    ((line, problem),) = lines_broken_by_comments(broken)
    first, last = broken[: broken.index("(\n") + 1], broken[: broken.index("#")]
    assert line <= first.count("\n") + 1
    assert f"line {last.count(chr(10)) + 1} breaks this line" in problem


@pytest.mark.parametrize(
    "kept",
    [
        "# the first and the last\npair = (0, 0.0)\n",
        "names = (\n    'a', 'b',\n)  # fmt: skip\n",
        "names = (\n    'a',  # of a comment\n    'b',\n)  # both\n",
        f"names = (\n    {'x' * 60},\n    {'y' * 60},\n)  # too long for one line\n",
    ],
)
def test_lines_that_are_broken_for_another_reason_stay(kept: str) -> None:
    assert list(lines_broken_by_comments(kept)) == []


@pytest.mark.parametrize(
    "back",
    [
        "from tokenmill.room import first",
        "import tokenmill.room.first",
        "def load():\n    from tokenmill.room.first import VALUE",
        "if TYPE_CHECKING:\n    from tokenmill.room.first import VALUE",
    ],
)
def test_a_cycle_of_imports_inside_a_room_is_found(back: str) -> None:
    files = {
        "api_client/tokenmill/room/__init__.py": "",
        "api_client/tokenmill/room/first.py": "from tokenmill.room.second import VALUE",
        "api_client/tokenmill/room/second.py": "from tokenmill.room.third import VALUE",
        "api_client/tokenmill/room/third.py": "from tokenmill.room import other\nVALUE = 1",
    }
    assert list(import_cycle(files)) == []
    files["api_client/tokenmill/room/third.py"] = back
    (found,) = import_cycle(files)
    assert found.startswith("files import each other in a cycle: ")
    assert all(f"room/{name}.py" in found for name in ("first", "second", "third"))


@pytest.mark.parametrize(
    ("folder", "package"),
    [
        ("worker/tokenmill_worker/engines/own/cpu/fused", "tokenmill_worker.engines.own.cpu.fused"),
        ("schemas/tokenmill_schemas", "tokenmill_schemas"),
        ("migrations/tokenmill_migrations", "tokenmill_migrations"),
        ("ops/tools", "ops.tools"),
    ],
)
def test_a_cycle_of_imports_is_found_in_every_package(folder: str, package: str) -> None:
    files = {
        f"{folder}/first.py": f"from {package}.second import VALUE",
        f"{folder}/second.py": f"from {package} import first",
    }
    (found,) = import_cycle(files)
    assert f"{folder}/first.py" in found


def test_a_missing_file_of_the_walk_through_the_code_is_found(tmp_path: Path) -> None:
    readme = (
        "## Files\nsrc/c.py  not of the walk\n## Read the code in this order\n\n"
        "```\nsrc/a.py   one\nsrc/b.lua  two\n```\n\n## Licence\nsrc/d.py  no\n"
    )
    (tmp_path / "src").mkdir()
    for name in ("a.py", "b.lua"):
        (tmp_path / "src" / name).touch()
    assert list(broken_walk(readme, tmp_path)) == []
    (tmp_path / "src" / "b.lua").unlink()
    assert list(broken_walk(readme, tmp_path)) == [
        "README.md: the file to read src/b.lua does not exist"
    ]
    assert list(broken_walk("## Files\n", tmp_path)) == ["README.md: names no files to read first"]


@pytest.mark.parametrize("suffix", ["h", "cpp", "lua"])
def test_a_line_of_101_columns_is_found(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"wide.{suffix}"
    path.write_text("×" * 100 + "\n" + "x" * 101 + "\n")
    assert list(problems(path, path.name)) == [f"{path.name}:2: 101 columns, 100 at most"]


def test_binary_files_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    assert list(problems(path, "image.png")) == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import pickle", "imports pickle"),
        ("import os, shelve", "imports shelve"),
        ("def f():\n    from marshal import loads", "imports marshal"),
        ("import cloudpickle.sub as c", "imports cloudpickle.sub"),
        ("torch.load(path)", "torch.load without"),
        ("torch.load(path, weights_only=False)", "torch.load without"),
        ("numpy.load(path, allow_pickle=True)", "with allow_pickle"),
        ("importlib.import_module('pickle')", "imports pickle"),
    ],
)
def test_reads_of_formats_that_run_code_are_found(source: str, says: str) -> None:
    [(_, what)] = dangerous_reads(source)
    assert says in what


@pytest.mark.parametrize(
    "source", ["import msgspec", "torch.load(p, weights_only=True)", "from x import pickle_free"]
)
def test_safe_reads_are_accepted(source: str) -> None:
    assert list(dangerous_reads(source)) == []


def test_docstrings_without_a_subject_are_found() -> None:
    source = """
class Steps:
    '''Of one engine.'''

    def run(self) -> None:
        '''`Until` the device is lost.'''

    def plan(self) -> None:
        '''Plan the next step, which may be empty.'''
"""
    assert [(line, what.split(":")[0]) for line, what in docstrings_without_subject(source)] == [
        (2, "a docstring opens with 'Of'"),
        (5, "a docstring opens with 'Until'"),
    ]


@pytest.mark.parametrize(
    ("docstring", "num_found"),
    [
        ("Is there room?", 1),
        ("Does it wait, and is the pause over? Then call it again.", 1),
        ("Return whether there is room.", 0),
        ("Give back jobs, each as (job id, crashed?).", 0),
    ],
)
def test_a_docstring_that_opens_with_a_question_is_found(docstring: str, num_found: int) -> None:
    source = f'def has_room():\n    """{docstring}"""\n'
    assert len(list(docstrings_without_subject(source))) == num_found
