"""The device benchmark on the CPU with a tiny model: all of its code but the CUDA parts; and what
it counts.
"""

import argparse
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ops.benchmarks.__main__ import main
from ops.benchmarks.gpu.measures import EngineMeasures, configure, engine_of
from ops.benchmarks.gpu.models import describe, random_model
from ops.benchmarks.gpu.session import Session
from ops.benchmarks.measure.step_floor import SHAPES, Ceilings, Shape, Work
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.plan import StepPlan

TINY = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--batch", "1", "--batch", "3",
        "--steps", "8",
        "--prefill", "96", "--context", "20"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.model
def test_bench_gpu_completes_on_a_tiny_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every path but those of CUDA."""
    out = tmp_path / "gpu.json"
    assert main(["gpu", *TINY, "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    found = record["results"]["tiny"]
    for setting, batches in (("default", (1, 3)), ("8-bit keys and values", (3,))):
        for batch in batches:
            assert found[f"{setting}: decode {batch}"]["share_of_floor"] > 0
    assert found["default: prefill"]["tokens_s"] > 0
    assert found["default: drawn 3"]["tokens_s"] > 0
    assert record["left_out"] == {}
    said = capsys.readouterr().out
    assert "beside the floor" in said


@pytest.mark.model
def test_measurements_without_time_left_are_named_in_a_complete_record(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert main(["gpu", *TINY, "--limit", "0", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["left_out"] == {"tiny: model": "no time was left"}
    assert record["ceilings"]["bytes_s"] > 0


def test_a_failed_measurement_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    options = argparse.Namespace(
        device="cpu",
        dtype="float32",
        limit=60.0,
        keep=lambda record: kept.append(copy.deepcopy(record)),
    )
    session = Session(options, Console(quiet=True))
    session.attempt("tiny", "first", lambda: {"tokens_s": 1.0})
    session.attempt("tiny", "second", lambda: 1 // 0)
    session.attempt("tiny", "third", lambda: {"tokens_s": 3.0})
    assert kept[-1]["results"] == {"tiny": {"first": {"tokens_s": 1.0}, "third": {"tokens_s": 3.0}}}
    assert kept[-1]["left_out"] == {
        "tiny: second": "ZeroDivisionError: integer division or modulo by zero"
    }
    assert [len(record["results"].get("tiny", {})) for record in kept] == sorted(
        len(record["results"].get("tiny", {})) for record in kept
    )
    assert session.record["ok"] is False


CEILINGS = Ceilings(1e9, 1e9, 1e9, 1e9)


@contextmanager
def engine_and_options(**changes: Any) -> Iterator[tuple[Engine, argparse.Namespace]]:
    fields = {
        "device": "cpu",
        "dtype": "float32",
        "batch": [24],
        "context": 200,
        "prefill": 50,
        "steps": 4,
    }
    options = argparse.Namespace(**{**fields, **changes})
    config = configure(SHAPES["tiny"], options)
    loaded = describe(random_model(SHAPES["tiny"], "cpu", torch.float32), config)
    with engine_of(loaded, config) as engine:
        yield engine, options


def test_sequences_started_first_last_until_the_end_of_the_measurement() -> None:
    with engine_and_options() as (engine, options):
        found = EngineMeasures(engine, SHAPES["tiny"], CEILINGS, options).decode(24)
    assert found["tokens_s"] > 0


def test_the_floor_counts_the_tokens_that_the_steps_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sequences have grown by some 90 tokens when the last prompt is read."""
    reads, counted = [], []

    def floor_s(_self: Shape, _ceilings: Ceilings, work: Work) -> float:
        counted.append(work.read)
        return 1.0

    monkeypatch.setattr(Shape, "floor_s", floor_s)
    with engine_and_options() as (engine, options):
        launch = engine.runner.launch

        def noting(plan: StepPlan) -> Any:
            reads.append(sum(item.start + item.num_tokens for item in plan.scheduled))
            return launch(plan)

        monkeypatch.setattr(engine.runner, "launch", noting)
        EngineMeasures(engine, SHAPES["tiny"], CEILINGS, options).decode(24)
    measured = reads[-options.steps :]
    assert counted == [pytest.approx(sum(measured) / len(measured), abs=24)]  # a token each
    assert counted[0] > 24 * (200 + 30)


def test_a_batch_that_shrinks_fails_the_measurement() -> None:
    with engine_and_options(batch=[2], context=20) as (engine, options):
        options.steps = -14  # so many tokens fewer than they would make
        with pytest.raises(RuntimeError, match="2 sequences ended"):
            EngineMeasures(engine, SHAPES["tiny"], CEILINGS, options).decode(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_bench_gpu_without_a_device_fails_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gpu"]) == 1
    assert "no CUDA device" in capsys.readouterr().out


def test_the_floor_is_the_sum_of_what_bounds_each_operation() -> None:
    """Operations bound the products of this batch, and bytes attention: their maxima add up."""
    shape, ceilings = SHAPES["llama-3-8b"], Ceilings(bytes_s=4e12, operations_s=400e12)
    work = Work(
        tokens=256, sampled=256, read=256 * 512, pairs=256 * 512, weight_bytes=2, kv_bytes=2
    )
    products = 2 * shape.num_weights * 256 / 400e12
    attention = 2 * 32 * 8 * 128 * 256 * 512 * 2 / 4e12
    assert shape.floor_s(ceilings, work) == pytest.approx(products + attention)
    whole_bytes = (2 * shape.num_weights + attention * 4e12) / 4e12
    whole_operations = products + 4 * 32 * 32 * 128 * 256 * 512 / 400e12
    assert shape.floor_s(ceilings, work) > 1.2 * max(whole_bytes, whole_operations)


def test_the_floor_of_a_prefill_counts_one_row_of_the_head() -> None:
    shape, ceilings = SHAPES["tiny"], Ceilings(bytes_s=1e30, operations_s=1.0)
    body = 2 * (shape.num_weights - 64 * 512)
    work = Work(tokens=10, sampled=1, read=10, pairs=55, weight_bytes=4, kv_bytes=4)
    assert shape.floor_s(ceilings, work) == 10 * body + 2 * 64 * 512 + 4 * 2 * 4 * 16 * 55


@pytest.mark.parametrize("name", SHAPES)
def test_the_count_of_weights_equals_transformers(name: str) -> None:
    from dataclasses import asdict

    from transformers import AutoConfig, AutoModelForCausalLM

    fields = asdict(SHAPES[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert SHAPES[name].num_weights == products
