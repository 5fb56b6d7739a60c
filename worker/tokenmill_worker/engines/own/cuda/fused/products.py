"""Linear layers of a device: our kernels multiply few rows, torch multiplies more.

A product of few rows takes as long as reading its weight. Speed of that reading, for the weights of
Llama-3-8B's layers, as a share of a copy's speed:

| | torch's libraries | these kernels |
|---|---|---|
| bfloat16, up to 16 rows, H200 | 58 to 100 % | 68 to 101 % |
| bfloat16, 32 rows, H100 | 75 to 93 % | 79 to 95 % |
| 8 bits, 16 to 64 rows, H100 | 39 to 82 % | 57 to 93 % |
| 8 bits, 128 rows, two weights with 4,096 outputs, H100 | 40, 52 % | 55, 69 % |

With 64 rows in bfloat16 a step takes 3 % longer with these kernels than with the library's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor, nn

from tokenmill_worker.engines.own.cuda.fused.product_kernels import few_rows_kernel, one_row_kernel
from tokenmill_worker.engines.own.cuda.overlap import overlap_of

_MOST_ROWS = {2: 32, 1: 64}  # by the bytes of a number of the weight
_ROWS = 64  # of a program, at most
_OUTPUTS = 64  # of a program with several rows: tensor cores multiply these at once
_OUTPUTS_OF_ONE = 16  # of a program with one row
_TILE_BYTES = 256  # of one output's weights in a tile; with one row a tile has twice as many
_LEAST_SHARED_BYTES = 200 << 10  # of shared memory: six tiles with 64 rows take 192 KiB
_HALF_OF_SHARED_BYTES = 110 << 10  # two programs that take no more share a multiprocessor


class DeviceLinear(nn.Linear):
    """A linear layer that uses a given weight without a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if not can_multiply(rows, self.weight):
            return super().forward(x)
        out = multiply(rows, self.weight, self.bias, x.dtype)
        return out.view(*x.shape[:-1], self.out_features)


def can_multiply(rows: Tensor, weight: Tensor) -> bool:
    """Return whether `multiply` takes these: few rows, and sizes that its tiles divide evenly."""
    outputs, inputs = weight.shape
    row_bytes = inputs * weight.element_size()
    return (
        weight.element_size() in _MOST_ROWS
        and 0 < len(rows) <= _most_rows(weight)
        and _holds_tiles(weight.device)
        and weight.is_contiguous()
        and not outputs % _OUTPUTS
        and row_bytes >= 4 * _TILE_BYTES
        and not row_bytes % (2 * _TILE_BYTES)
    )


def multiply(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the products `[num_rows, num_outputs]`.

    Args:
        rows: `[num_rows, num_inputs]`.
        weight: `[num_outputs, num_inputs]`, of the same type.
        bias: `[num_outputs]`.
        dtype: of the result.
        scales: of the rows and of the outputs, float32; with 8 bits.
    """
    rows = rows.contiguous()
    (num_rows, inputs), outputs = rows.shape, len(weight)
    out = torch.empty((num_rows, outputs), dtype=dtype, device=rows.device)
    row_scales, weight_scales = scales or (rows, rows)
    tile = _TILE_BYTES // weight.element_size()
    flags = {"HAS_BIAS": bias is not None, "HAS_SCALES": scales is not None}
    flags |= overlap_of(rows.device)
    if num_rows == 1:
        one_row_kernel[(outputs // _OUTPUTS_OF_ONE,)](
            rows, weight, bias, row_scales, weight_scales, out,
            INPUTS=inputs, OUTPUTS=_OUTPUTS_OF_ONE, TILE=2 * tile, NUM_STAGES=4, **flags,
        )  # fmt: skip
        return out
    rows_a_program = min(_ROWS, max(16, triton.next_power_of_2(num_rows)))
    grid = (outputs // _OUTPUTS, triton.cdiv(num_rows, rows_a_program))
    if grid[0] * grid[1] <= _num_multiprocessors(rows.device):
        stages = 6  # a program that has a multiprocessor to itself loads more tiles ahead
    else:
        stages = min(4, _HALF_OF_SHARED_BYTES // ((_OUTPUTS + rows_a_program) * _TILE_BYTES))
    few_rows_kernel[grid](
        rows, weight, bias, row_scales, weight_scales, out, num_rows, outputs,
        INPUTS=inputs, OUTPUTS=_OUTPUTS, ROWS=rows_a_program, TILE=tile, NUM_STAGES=stages, **flags,
    )  # fmt: skip
    return out


def _most_rows(weight: Tensor) -> int:
    """Return how many rows our kernels take. In 8 bits they are twice as many if the weight has so
    few outputs that two programs for each 64 are on the device at once.

    These two read the same weights at the same time, and the second finds them in the cache.
    """
    size = weight.element_size()
    programs = 2 * len(weight) // _OUTPUTS
    has_room = size == 1 and programs <= _num_multiprocessors(weight.device)
    return 2 * _MOST_ROWS[size] if has_room else _MOST_ROWS[size]


@lru_cache
def _holds_tiles(device: torch.device) -> bool:
    """Return whether the device has a Hopper's shared memory: smaller ones were not measured."""
    if device.type != "cuda":
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= _LEAST_SHARED_BYTES)


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
