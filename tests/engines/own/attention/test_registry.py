"""The choice of a backend, and why the others were not taken."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from tokenmill_worker.engines.own.attention import (
    AttentionShape,
    backend_class,
    backend_names,
    choose,
    why_not,
)
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.cuda.attention import flash

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
ODD = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=7, scale=0.3)


def test_auto_chooses_reference_if_no_other_backend_can_serve() -> None:
    assert choose("auto", CPU, torch.float32, [SHAPE, ODD], 16).name == "reference"
    assert choose("reference", CPU, torch.float32, [SHAPE], 16).name == "reference"


def test_amx_is_used_only_if_the_setting_allows_it() -> None:
    for amx in (True, False):
        assert choose("auto", CPU, torch.float32, [SHAPE], 16, amx).uses_amx is amx


def test_an_explicit_choice_that_cannot_work_is_refused_with_its_reason() -> None:
    with pytest.raises(EngineConfigError, match=r"'flash' cannot be used: .+"):
        choose("flash", CPU, torch.float32, [SHAPE], 16)


def test_auto_logs_the_chosen_backend_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose("auto", CPU, torch.float32, [ODD], 16).name == "reference"
    (record,) = caplog.records
    assert record.message.startswith("Attention 'reference' is used: attention backend 'cpu'")


def test_the_block_size_defaults_to_the_backend_s(monkeypatch: pytest.MonkeyPatch) -> None:
    library = flash.FlashLibrary(2, None)
    monkeypatch.setattr(flash, "installed_library", lambda capability: library)
    cuda, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert choose("flash", cuda, half, [SHAPE], 0).name == "flash"
    assert backend_class("flash").default_block_size(cuda) == 256
    reason = why_not("flash", cuda, half, [SHAPE], 16)
    assert reason is not None
    assert "256" in reason


def test_auto_prefers_triton_to_flash_attn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = flash.FlashLibrary(3, None)
    monkeypatch.setattr(flash, "installed_library", lambda capability: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert choose("auto", torch.device("cuda"), torch.bfloat16, [SHAPE], 16).name == "triton"


def test_flash_without_its_package_gives_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash, "installed_library", no_library)
    cuda = torch.device("cuda")
    assert backend_class("flash").default_block_size(cuda) == 16
    reason = why_not("flash", cuda, torch.bfloat16, [SHAPE], 0)
    assert reason == "flash-attn is not installed (No module named 'flash_attn')"


def no_library(_capability: int) -> None:
    raise ModuleNotFoundError("No module named 'flash_attn'")


def test_chunked_attention_is_served_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    library = flash.FlashLibrary(3, None)
    monkeypatch.setattr(flash, "installed_library", lambda capability: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    shapes = [SHAPE, replace(SHAPE, is_chunked=True)]
    reason = why_not("flash", torch.device("cuda"), torch.bfloat16, shapes, 16)
    assert reason == "flash-attn 3 has no chunked attention"
    assert why_not("triton", torch.device("cuda"), torch.bfloat16, shapes, 16) is None


def test_a_backend_is_rejected_if_it_cannot_serve_one_layer() -> None:
    reason = why_not("cpu", CPU, torch.float32, [SHAPE, ODD], 16)
    assert reason is not None


@pytest.mark.parametrize("name", backend_names())
def test_every_backend_serves_or_gives_a_reason(name: str) -> None:
    reason = why_not(name, CPU, torch.float32, [SHAPE], 16)
    assert reason is None or len(reason.split()) > 2
