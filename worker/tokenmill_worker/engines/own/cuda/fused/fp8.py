"""Linear layers with products in 8 bits (E4M3): a scale for each output of a weight and each input.

A scale makes the largest number of its row 448, the largest of E4M3. Inputs are rounded at each
product; the sums are float32. The layers are those of fused attention and MLP: head, embeddings and
routers keep their type.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.cuda.fused.launches import LEAST_SCALE, quantize
from tokenmill_worker.engines.own.cuda.fused.modules import DeviceAttention, DeviceMLP
from tokenmill_worker.engines.own.cuda.fused.products import DeviceLinear, can_multiply, multiply

log = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(E4M3).max
_MULTIPLE = 16  # torch multiplies in 8 bits only if this divides inputs and outputs


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies with another layer's weight, rounded to 8 bits."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features, device="meta")
        weight, scale = rounded(source.weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale.view(1, -1), requires_grad=False)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        narrow, scale = quantize(rows) if rows.is_cuda else rounded(rows)
        if can_multiply(narrow, self.weight):
            out = multiply(narrow, self.weight, self.bias, x.dtype, (scale, self.scale))
        else:
            out = torch._scaled_mm(
                narrow, self.weight.t(), scale, self.scale, self.bias, out_dtype=x.dtype
            )
        return out.view(*x.shape[:-1], self.out_features)


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows `[num_rows, width]` in E4M3 and their scales, float32 `[num_rows, 1]`."""
    wide = rows.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp_min_(LEAST_SCALE * _LARGEST) / _LARGEST
    return (wide / scale).clamp_(-_LARGEST, _LARGEST).to(E4M3), scale


def quantize_products(model: nn.Module, name: str) -> None:
    """Replace the linear layers of a model's fused attention and MLP in place.

    Raises EngineConfigError if there are none.
    """
    count = 0
    for module in model.modules():
        if not isinstance(module, DeviceAttention | DeviceMLP):
            continue
        for child, linear in list(module.named_children()):
            if type(linear) is DeviceLinear and not any(
                size % _MULTIPLE for size in linear.weight.shape
            ):
                setattr(module, child, Fp8Linear(linear))
                count += 1
    if not count:
        raise EngineConfigError([f"no layer of {name} can be quantised: none is fused"])
    log.info("%d linear layers multiply in 8 bits", count)
