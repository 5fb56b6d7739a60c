"""`ops/bench step`: the parts of a step add up to it, and each is what it is called."""

import json
from pathlib import Path
from typing import Any

import pytest

from ops.benchmarks.__main__ import main
from ops.benchmarks.commands.step import AROUND, OUTSIDE, PARTS, SHARED, WHOLE
from tests.engine.truth import tiny_models


def measure(folder: Path, *arguments: str) -> dict[str, dict[str, float]]:
    out = folder / "out.json"
    fixed = ["--model", str(folder), "--context", "5", "--steps", "1", "--json", str(out)]
    assert main(["step", *fixed, *arguments]) == 0
    results: dict[str, dict[str, float]] = json.loads(out.read_text())["results"]["step"]
    return results


def test_parts_and_what_is_around_them_are_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure(tiny_models.save("llama", tmp_path), "--sequences", "3", "--sequences", "32")
    assert list(found) == ["3", "32"]
    for figures in found.values():
        assert sum(figures[part] for part in PARTS.values()) + figures[AROUND] == pytest.approx(
            figures[WHOLE]
        )
        assert all(figures[part] > 0 for part in SHARED)
        assert figures[OUTSIDE] == pytest.approx(
            1 - sum(figures[part] for part in SHARED) / figures[WHOLE]
        )
    printed = capsys.readouterr().out
    assert "the goal of 10%" in printed


def test_a_model_that_is_not_one_program_has_whole_steps_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: Any = measure(
        tiny_models.save("llama", tmp_path), "--sequences", "2", "--set", "fuse=false"
    )
    assert set(found["2"]) == {WHOLE}
    printed = capsys.readouterr().out
    assert "only whole steps" in printed
    assert "outside of" not in printed
