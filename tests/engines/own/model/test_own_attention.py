"""Families that compute their scores themselves are served, with ALiBi in more head dimensions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from ops.model_families import small, trial
from tests.support.marks import long_unless
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.model import own_attention
from tokenmill_worker.engines.own.model.loader import load_model, resolve_length


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("bloom", ""),
        ("mpt", ""),
        ("falcon", ""),
        ("falcon", "ALiBi"),
        ("falcon", "ALiBi, multi-query"),
        ("falcon", "new decoder"),
        ("gptj", ""),
        ("gpt_neo", ""),
    ],
)
@pytest.mark.parametrize("attention", long_unless({"cpu"}, ["cpu", "reference"]))
def test_families_with_their_own_attention_give_generate_s_tokens(
    family: str, setting: str, attention: str
) -> None:
    found = trial.run(family, setting, attention=attention)
    assert (found.outcome, found.reason) == ("equal", "")


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16, 71])
def test_alibi_slopes_equal_those_of_bloom_and_mpt(heads: int) -> None:
    slopes = own_attention.alibi_slopes(heads)
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # [heads, 1, 2]
    torch.testing.assert_close(slopes, bloom[:, 0, 1])
    mpt = build_mpt_alibi_tensor(heads, 2)  # [heads, 1, 2], relative to the last position
    torch.testing.assert_close(slopes, -mpt[:, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_inputs_hold_the_bias_of_far_positions(dtype: torch.dtype) -> None:
    bias = torch.tensor([20_000.0, 20_001.0, 20_002.0])[:, None] * 2.0**-8
    query, key = torch.zeros(3, 1, 16, dtype=dtype), torch.zeros(3, 1, 16, dtype=dtype)
    query, key = own_attention._with_bias(query, key, bias, scale=0.25)
    assert query.shape == key.shape == (3, 1, 24)
    scores = 0.25 * (query.float() * key.float()).sum(-1)
    torch.testing.assert_close(scores, bias, rtol=0, atol=2.0**-9)


def test_a_length_under_another_configuration_name_is_read() -> None:
    assert resolve_length(SimpleNamespace(seq_length=2048), None) == 2048
    assert resolve_length(SimpleNamespace(max_seq_len=4096), 100) == 100


def test_local_layers_of_gpt_neo_have_a_window(tmp_path: Path) -> None:
    small.build("gpt_neo").save_pretrained(tmp_path)
    settings = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", fuse=False)
    groups = load_model(tmp_path, settings, CpuDevice()).groups
    assert [group.window for group in groups] == [
        None,
        Window(small.configuration("gpt_neo").window_size),
    ]
