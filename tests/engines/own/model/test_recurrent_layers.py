"""Recurrent layers: how they are made to run through the engine's steps."""

from __future__ import annotations

import torch

from ops.model_families import small
from tokenmill_worker.engines.own.model import recurrent_layers


def test_a_recurrent_module_in_16_bits_may_keep_weights_in_float32() -> None:
    model = small.build("olmo_hybrid").to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data = weight.data.float()
    recurrent_layers.adapt(model, "MODEL")
    assert recurrent_layers.is_recurrent(model)
