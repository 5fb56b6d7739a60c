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


def test_reference_serves_where_no_other_does() -> None:
    assert choose("auto", CPU, torch.float32, [SHAPE, ODD], 16).name == "reference"
    assert choose("reference", CPU, torch.float32, [SHAPE], 16).name == "reference"


def test_matrix_registers_are_used_where_they_are_allowed() -> None:
    for amx in (True, False):
        assert choose("auto", CPU, torch.float32, [SHAPE], 16, amx).uses_amx is amx


def test_an_explicit_choice_that_cannot_work_is_refused_with_its_reason() -> None:
    with pytest.raises(EngineConfigError, match=r"'flash' cannot be used: .+"):
        choose("flash", CPU, torch.float32, [SHAPE], 16)


def test_auto_logs_what_it_chose_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose("auto", CPU, torch.float32, [ODD], 16).name == "reference"
    (record,) = caplog.records
    assert record.message.startswith("Attention 'reference' is used: attention backend 'cpu'")


def test_the_block_size_is_the_backend_s_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    library = flash.FlashLibrary(2, None)
    monkeypatch.setattr(flash, "installed_library", lambda capability: library)
    cuda, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert choose("flash", cuda, half, [SHAPE], 0).name == "flash"
    assert backend_class("flash").default_block_size(cuda) == 256
    reason = why_not("flash", cuda, half, [SHAPE], 16)
    assert reason is not None
    assert "256" in reason


def test_auto_prefers_triton_which_was_measured_to_flash_attn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = flash.FlashLibrary(3, None)
    monkeypatch.setattr(flash, "installed_library", lambda capability: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert choose("auto", torch.device("cuda"), torch.bfloat16, [SHAPE], 16).name == "triton"


def test_without_flash_attn_and_a_block_size_it_gives_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash, "installed_library", no_library)
    cuda = torch.device("cuda")
    assert backend_class("flash").default_block_size(cuda) == 16
    reason = why_not("flash", cuda, torch.bfloat16, [SHAPE], 0)
    assert reason == "flash-attn is not installed (No module named 'flash_attn')"


def no_library(_capability: int) -> None:
    raise ModuleNotFoundError("No module named 'flash_attn'")


def test_chunked_attention_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    library = flash.FlashLibrary(3, None)
    monkeypatch.setattr(flash, "installed_library", lambda capability: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    shapes = [SHAPE, replace(SHAPE, is_chunked=True)]
    reason = why_not("flash", torch.device("cuda"), torch.bfloat16, shapes, 16)
    assert reason == "flash-attn 3 has no chunked attention"
    assert why_not("triton", torch.device("cuda"), torch.bfloat16, shapes, 16) is None


def test_one_layer_that_a_backend_cannot_serve_is_enough() -> None:
    reason = why_not("cpu", CPU, torch.float32, [SHAPE, ODD], 16)
    assert reason is not None


@pytest.mark.parametrize("name", backend_names())
def test_every_backend_answers_in_a_sentence_or_serves(name: str) -> None:
    reason = why_not(name, CPU, torch.float32, [SHAPE], 16)
    assert reason is None or len(reason.split()) > 2
