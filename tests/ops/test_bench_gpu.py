"""The device benchmark on the CPU with a tiny model: all of its code but the CUDA parts; and what it counts."""

import json
from pathlib import Path

import pytest
import torch

from ops.benchmarks.__main__ import main
from ops.benchmarks.device_gaps import summarise
from ops.benchmarks.gpu import SHAPES


@pytest.mark.model
def test_the_whole_command_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    wanted = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--batch",
        "1",
        "--batch",
        "3",
        "--steps",
        "8",
    ]
    more = ["--prefill", "96", "--context", "20", "--attention", "reference", "--profile", "--json", str(out)]
    assert main(["gpu", *wanted, *more]) == 0
    record = json.loads(out.read_text())
    (found,) = record["results"]["tiny"]["backends"]
    assert found["attention"] == "reference"
    assert set(found["decode"]) == {"1", "3"}
    for figures in found["decode"].values():
        assert 0 < figures["share_of_bandwidth"] <= figures["share_of_roofline"] * 1.001
    assert found["prefill"]["tokens_s"] > 0
    assert "share of the ceilings" in capsys.readouterr().out


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


def test_gaps_are_summed_by_their_neighbours() -> None:
    spans = [(0.0, 40.0, "a"), (50.0, 90.0, "b"), (20.0, 45.0, "c"), (90.5, 100.0, "a")]
    found = summarise(spans, steps=1)
    assert [(gap["between"], gap["ms"]) for gap in found["gaps"]] == [("c → b", pytest.approx(0.005))]
    assert found["busy"] == pytest.approx(1 - 5.5 / 100)
