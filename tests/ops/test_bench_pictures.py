"""Pictures of what was measured: drawn from records, as files that are images; what cannot be drawn
is one sentence.
"""

from pathlib import Path
from typing import Any

import pytest

from ops.benchmarks.__main__ import main
from ops.benchmarks.pictures import PictureError, draw

FIGURES = {
    "output_tok_s": 100.0,
    "prompt_tok_s": 50.0,
    "ttft_p50_ms": 20.0,
    "ttft_p99_ms": 40.0,
    "tpot_p50_ms": 5.0,
    "tpot_p99_ms": 8.0,
}
NO_TPOT = {name: value for name, value in FIGURES.items() if not name.startswith("tpot")}


def engines(figures: dict[str, float]) -> dict[str, list[dict[str, float]]]:
    names = ("tokenmill", "vllm", "floor mkl")
    return {name: [figures, {**figures, "output_tok_s": 120.0}] for name in names}


RECORD: dict[str, Any] = {"rounds": {"decode": engines(FIGURES), "prefill": engines(NO_TPOT)}}


def test_engines_have_a_picture(tmp_path: Path) -> None:
    path = draw(RECORD, tmp_path / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_picture_names_what_was_measured(tmp_path: Path) -> None:
    draw(RECORD, tmp_path / "a.svg")
    assert "time to first token" in (tmp_path / "a.svg").read_text()


def test_without_a_finished_round_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="no finished round"):
        draw({"rounds": {"decode": {"tokenmill": []}}}, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_bad_name_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "--workload", "/nowhere.json", "--plot", str(tmp_path / "a.bmp")]) == 1
    assert ".png, .svg, .pdf" in capsys.readouterr().err
    with pytest.raises(PictureError, match="no folder"):
        draw(RECORD, tmp_path / "nowhere" / "a.png")
