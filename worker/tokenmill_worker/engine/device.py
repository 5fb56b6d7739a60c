"""Describes what differs between the devices that a model runs on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenmill_worker.engine.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors that model and sampler read."""

    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    rows: Tensor  # int64 [num_sampled_rows]: the packed rows whose logits are wanted
    metadata: tuple[AttentionMetadata, ...]  # by layer group
