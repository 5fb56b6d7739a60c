"""Quantised linear layers on the CPU: 8-bit weights and activations; 4-bit weights with float32
activations.

Both pack into the same `PackedWeight` as float32 does and take the same epilogues. With 8 bits a
row's result does not depend on the batch; with 4 bits it does, as in linear.py.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from tokenmill_worker.engines.own.cpu.huge_pages import HugePageArena
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.linear import PackedWeight, padded, padded_bias
from tokenmill_worker.engines.own.cpu.kernels.program import Caller

MAX_INT8_DEPTH = 65_536  # sums of 255 · 128 fit 31 bits up to here
INT4_GROUP = 32
_RANGES = (1.0, 0.95, 0.9, 0.84)  # shares of a group's range to try
_ROWS_AT_ONCE = 1024


class Int8Packer:
    """Packs 8-bit weights with one scale per output; activations are rounded at run time, each row
    in its own range.
    """

    def __init__(
        self, cache_dir: Path | None = None, march: str = "native", uses_amx: bool = True
    ) -> None:
        self._library = library = load("linear_int8", cache_dir, march)
        self._call, self._uses_amx = Caller(cache_dir, march), uses_amx
        self._pack = library.tokenmill_pack
        self._pack.restype = None
        self._panel_bytes = library.tokenmill_panel_bytes
        self._panel_bytes.restype = c_int64
        self.panel_width: int = library.tokenmill_panel_width()
        self._arena = HugePageArena()

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """Pack `weight` `[n, k]`; k is at most MAX_INT8_DEPTH."""
        n, k = weight.shape
        if k > MAX_INT8_DEPTH:
            raise ValueError(f"8-bit weights take at most {MAX_INT8_DEPTH} inputs, not {k}")
        integers, scale = round_int8(weight)
        panels = self._arena.take(self._panel_bytes(c_int64(n), c_int64(k)), torch.uint8)
        self._pack(
            c_void_p(integers.data_ptr()), c_void_p(panels.data_ptr()), c_int64(n), c_int64(k)
        )
        sums = scale * integers.sum(dim=1)
        by_panel = [
            padded(part, self.panel_width).view(-1, self.panel_width) for part in (scale, sums)
        ]
        scales = torch.stack(by_panel, dim=1).contiguous()  # [panels, 2, panel_width]
        bias = padded_bias(bias, self.panel_width)
        return PackedWeight(
            self._call, self._library, (n, k), panels, scales, bias, "8 bits", self._uses_amx
        )


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers `[n, k]` in [-127, 127] and the scale of each row."""
    rows = weight.detach().float()
    scale = rows.abs().amax(dim=1) / 127.0
    integers = torch.round(rows / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None])
    return integers.to(torch.int8).contiguous(), scale


class Int4Packer:
    """Packs 4-bit weights with a half-precision scale and zero per group of 32 inputs; activations
    stay float32.
    """

    def __init__(
        self, cache_dir: Path | None = None, march: str = "native", uses_amx: bool = True
    ) -> None:
        self._library = library = load("linear_int4", cache_dir, march)
        self._call, self._uses_amx = Caller(cache_dir, march), uses_amx
        self._pack = library.tokenmill_pack
        self._pack.restype = None
        self.panel_width: int = library.tokenmill_panel_width()
        self._arena = HugePageArena()

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """Pack `weight` `[n, k]`; k is a multiple of INT4_GROUP."""
        if weight.shape[1] % INT4_GROUP:
            raise ValueError(
                f"4-bit weights take a multiple of {INT4_GROUP} inputs, not {weight.shape[1]}"
            )
        return self.pack_codes(*round_int4(weight), bias)

    def pack_codes(
        self, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None
    ) -> PackedWeight:
        """Pack codes, scales and zeros as `round_int4` returns them."""
        n, k = codes.shape
        columns = -(-n // self.panel_width) * self.panel_width
        panels = self._arena.take(columns * k // 8, torch.int32)
        scales = self._arena.take(columns * k // INT4_GROUP * 2, torch.float16)
        pointers = (c_void_p(tensor.data_ptr()) for tensor in (codes, scale, zero, panels, scales))
        self._pack(*pointers, c_int64(n), c_int64(k))
        bias = padded_bias(bias, self.panel_width)
        return PackedWeight(
            self._call, self._library, (n, k), panels, scales, bias, "4 bits", self._uses_amx
        )


def round_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes `[n, k]` in [0, 15], and each group's scale and zero `[n, k / 32]`.

    A weight is scale · code + zero. A group's range may be narrowed a little, where that lowers its
    squared error. Weights that came from such a format (GGUF's Q4_1) are restored exactly.
    """
    parts = [_round_rows(rows.float()) for rows in torch.split(weight.detach(), _ROWS_AT_ONCE)]
    codes, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes.contiguous(), scale.contiguous(), zero.contiguous()


def _round_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = rows.reshape(rows.shape[0], -1, INT4_GROUP)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    best: tuple[Tensor, ...] | None = None
    for share in _RANGES:
        cut = (high - low) * (1.0 - share) / 2
        scale, zero = ((high - low) * share / 15.0).half(), (low + cut).half()
        wide, start = scale.float()[..., None], zero.float()[..., None]
        codes = (
            ((groups - start) / wide.clamp_min(torch.finfo(torch.float32).tiny))
            .round_()
            .clamp_(0, 15)
        )
        error = (codes * wide + start - groups).square_().sum(dim=-1)
        found = (codes.to(torch.uint8), scale, zero, error)
        best = found if best is None else _lower(best, found)
    assert best is not None
    return best[0].reshape(rows.shape), best[1], best[2]


def _lower(best: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    better = found[3] < best[3]
    return (
        torch.where(better[..., None], found[0], best[0]),
        *(torch.where(better, new, old) for new, old in zip(found[1:], best[1:], strict=True)),
    )
