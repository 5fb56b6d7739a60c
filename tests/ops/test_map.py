"""The map of rooms names each room and its imports, and refuses a cycle.

`ops/check` holds the page against the tree.
"""

from functools import cache
from pathlib import Path

import pytest

from ops.tools import map as rooms


def test_a_stale_page_is_reported_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "architecture.md"
    page.write_text(f"before\n{rooms.BEGIN}\nold\n{rooms.END}\nafter\n")
    monkeypatch.setattr(rooms, "PAGE", page)
    monkeypatch.setattr(rooms, "drawn", cache(rooms.drawn))
    assert rooms.main(["--check"]) == 1
    assert "python ops/tools/map.py" in capsys.readouterr().out
    assert rooms.main([]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{rooms.END}\nafter\n")
    assert "| `scheduler` |" in text
    assert rooms.main(["--check"]) == 0


def test_rooms_and_their_imports_are_read_from_the_sources(tmp_path: Path) -> None:
    (tmp_path / "low").mkdir()
    (tmp_path / "low" / "__init__.py").write_text('"""Holds things. More."""\n')
    (tmp_path / "low" / "deep.py").write_text("import json\n")
    (tmp_path / "high.py").write_text("def call() -> None:\n    from own.low.deep import json\n")
    found = rooms.rooms_of(tmp_path)
    below = rooms.arrows(found, "own")
    assert below == {"low": set(), "high": {"low"}}
    assert rooms.in_order(below) == ["high", "low"]
    assert rooms.sentence(found["low"]) == "Holds things"


def test_a_cycle_of_rooms_is_refused() -> None:
    with pytest.raises(ValueError, match="a → b → a"):
        rooms.in_order({"a": {"b"}, "b": {"a"}})
