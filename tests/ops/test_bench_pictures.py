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


def engines(figures: dict[str, float], output_tokens: int) -> dict[str, Any]:
    rounds = {
        name: [figures, {**figures, "output_tok_s": 120.0}]
        for name in ("tokenmill", "vllm", "floor mkl")
    }
    return {
        "workload": "decode",
        "requests": 4,
        "prompt_tokens": 16,
        "output_tokens": output_tokens,
        "rounds": rounds,
        "summary": {name: {"output_tok_s": {"median": 110.0, "spread": 0.1}} for name in rounds},
    }


QUEUES = {
    "tokenmill": [{"jobs_s": 10.0, "bytes_per_job": 900.0}],
    "celery": [{"jobs_s": 5.0, "bytes_per_job": 90.0}],
}
RECORDS: dict[str, dict[str, Any]] = {
    "engine": {"command": "engine", "results": [engines(FIGURES, 64), engines(NO_TPOT, 4)]},
    "queue": {"command": "queue", "rounds": {"queue": QUEUES}},
}


@pytest.mark.parametrize("name", RECORDS)
def test_each_kind_has_a_picture(name: str, tmp_path: Path) -> None:
    path = draw(RECORDS[name], tmp_path / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_picture_names_what_was_measured(tmp_path: Path) -> None:
    draw(RECORDS["engine"], tmp_path / "a.svg")
    assert "floor mkl" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"command": "step"}, "no picture of step"),
        ({"command": "engine", "results": [{"summary": {}}]}, "no finished round"),
    ],
)
def test_what_cannot_be_drawn(record: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=said):
        draw(record, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_bad_name_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "--workload", "/nowhere.json", "--plot", str(tmp_path / "a.bmp")]) == 1
    assert ".png, .svg, .pdf" in capsys.readouterr().err
    with pytest.raises(PictureError, match="no folder"):
        draw(RECORDS["engine"], tmp_path / "nowhere" / "a.png")
