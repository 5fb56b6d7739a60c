"""Tests of the replacement of modules: its warnings, its memory, and its errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from tests.engines.own.truth import tiny_models
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.model.loader import load_model

pytest.importorskip("triton")
from tokenmill_worker.engines.own.cuda.attention.triton import is_interpreted
from tokenmill_worker.engines.own.cuda.fused import equivalence
from tokenmill_worker.engines.own.cuda.fused.replace import replace_modules
from tokenmill_worker.engines.own.model.paged_attention import IMPLEMENTATION, register
from tokenmill_worker.engines.own.model.replacement import replace_children

CHECKS = ("rows_are_equivalent", "attention_is_equivalent", "layers_are_equivalent")


@pytest.mark.skipif(is_interpreted(), reason="kernels are interpreted in this process")
def test_a_replacement_that_fails_logs_one_warning_and_the_model_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels do not run on a CPU's tensors."""
    folder = tiny_models.save("llama", tmp_path, num_layers=2)
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", fuse=False)
    assert not replace_modules(load_model(folder, config, CpuDevice()).model)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == len(set(said))
    assert {line.split(" is not fused")[0] for line in said} == {
        "LlamaRMSNorm",
        "LlamaMLP",
        "LlamaAttention",
    }


@pytest.mark.parametrize(("dtype", "num_layers"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_replaced_modules_are_freed_one_by_one(
    dtype: torch.dtype, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two sides of a comparison are in memory in float32."""
    for name in CHECKS:
        monkeypatch.setattr(equivalence, name, lambda original, candidate: True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = six_layers(dtype)
        with record_function("replacing"):
            assert replace_modules(model)["DeviceLayer"] == 6
    layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    assert 0 < peak_of(recorded) < num_layers * layer


def six_layers(dtype: torch.dtype) -> Any:
    register()
    config: Any = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config._attn_implementation = IMPLEMENTATION
    model: Any = transformers.LlamaForCausalLM(config)
    return model.to(dtype).eval().requires_grad_(False)


def peak_of(recorded: profile) -> int:
    """Return the most bytes that torch held while replacing, beyond those at its start."""
    profiler: Any = recorded.profiler
    events = profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == "replacing")
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.start_ns() >= start
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def out_of_memory(*_: object, **__: object) -> bool:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("name", CHECKS)
def test_a_comparison_that_runs_out_of_memory_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in CHECKS:
        monkeypatch.setattr(equivalence, check, lambda original, candidate: True)
    monkeypatch.setattr(equivalence, name, out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        replace_modules(six_layers(torch.float32))


@pytest.mark.parametrize("failing", [torch.cat, torch.ones], ids=["weights", "norm"])
def test_a_replacement_that_runs_out_of_memory_is_an_error(
    failing: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = six_layers(torch.float32)
    for check in CHECKS:
        monkeypatch.setattr(equivalence, check, lambda original, candidate: True)
    monkeypatch.setattr(torch, failing.__name__, out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        replace_modules(model)


def test_a_module_in_two_places_is_offered_in_both_and_its_children_once() -> None:
    shared = nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    offered: list[nn.Module] = []

    def build(_parent: nn.Module, _name: str, module: nn.Module) -> nn.Module | None:
        offered.append(module)
        return nn.Identity() if isinstance(module, nn.Linear) else None

    assert replace_children(model, build) == {"Identity": 1}
    assert [module is shared for module in offered].count(True) == 2
