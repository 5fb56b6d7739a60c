"""The device benchmark on the CPU with a tiny model: all of its code but the CUDA parts; and what it counts."""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ops.benchmarks.__main__ import main
from ops.benchmarks.device_gaps import summarise
from ops.benchmarks.gpu import Session
from ops.benchmarks.gpu_models import SHAPES

TINY = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--batch", "1", "--batch", "3", "--steps", "8",
        "--prefill", "96", "--context", "20", "--attention", "reference", "--attention", "flash"]  # fmt: skip


@pytest.mark.model
def test_the_whole_command_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every path but those of CUDA, the peer too."""
    out = tmp_path / "gpu.json"
    assert main(["gpu", *TINY, "--share", "0.05", "--rounds", "1", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    found = record["results"]["tiny"]
    settings = ("default", "without graphs", "without running ahead", "without fused modules", "attention reference")
    for setting in settings:
        decodes = {what: figures for what, figures in found.items() if what.startswith(f"{setting}: decode")}
        assert decodes, setting
        for figures in decodes.values():
            assert 0 < figures["share_of_bandwidth"] <= figures["share_of_roofline"] * 1.001
    assert {"default: decode 1", "default: decode 3", "default: drawn 3", "default: profile 3"} <= set(found)
    assert found["default: prefill"]["tokens_s"] > 0
    assert found["default: profile 3"]["busy"] > 0  # no operator of torch need take 2 % of so short a step
    assert isinstance(found["default: profile 3"]["kernels"], list)
    assert found["mixed"]["times_transformers"] > 0
    assert found["mixed"]["equal_answers"] == 1.0
    assert "does not run on cpu" in record["left_out"]["tiny: attention flash"]
    assert len(record["left_out"]) == 1
    assert "share of the ceilings" in capsys.readouterr().out


@pytest.mark.model
def test_what_the_limit_leaves_no_time_for_is_named_in_a_whole_record(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert main(["gpu", *TINY, "--limit", "0", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["left_out"] == {"tiny: model": "no time was left", "tiny: mixed": "no time was left"}
    assert record["ceilings"]["bytes_s"] > 0


def test_a_measurement_that_fails_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    options = argparse.Namespace(
        device="cpu", dtype="float32", limit=60.0, keep=lambda record: kept.append(copy.deepcopy(record))
    )
    session = Session(options, Console(quiet=True))
    session.attempt("tiny", "first", lambda: {"tokens_s": 1.0})
    session.attempt("tiny", "second", lambda: 1 // 0)
    session.attempt("tiny", "third", lambda: {"tokens_s": 3.0})
    assert kept[-1]["results"] == {"tiny": {"first": {"tokens_s": 1.0}, "third": {"tokens_s": 3.0}}}
    assert kept[-1]["left_out"] == {"tiny: second": "ZeroDivisionError: integer division or modulo by zero"}
    assert [len(record["results"].get("tiny", {})) for record in kept] == sorted(
        len(record["results"].get("tiny", {})) for record in kept
    )
    assert session.record["ok"] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == 1
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_counted_as_transformers_has_them(name: str) -> None:
    from dataclasses import asdict

    from transformers import AutoConfig, AutoModelForCausalLM

    fields = asdict(SHAPES[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert SHAPES[name].num_weights == products


def test_kernels_are_summed_by_name_and_gaps_by_their_neighbours() -> None:
    spans = [(0.0, 40.0, "a"), (50.0, 90.0, "b"), (20.0, 45.0, "c"), (90.5, 100.0, "a")]
    found = summarise(spans, steps=1)
    assert [(gap["between"], gap["ms"]) for gap in found["gaps"]] == [("c → b", pytest.approx(0.005))]
    assert [(kernel["name"], kernel["ms"]) for kernel in found["kernels"]] == [
        ("a", pytest.approx(0.0495)), ("b", pytest.approx(0.04)), ("c", pytest.approx(0.025)),
    ]  # fmt: skip
    assert found["busy"] == pytest.approx(1 - 5.5 / 100)
