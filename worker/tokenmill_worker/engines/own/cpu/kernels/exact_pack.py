"""Keeps float32 weights in a narrower form that restores each of them, bit for bit.

Few checkpoints are float32: most are bfloat16 or float16, and GGUF files hold blocks of 4 or 8 bits
with half-precision scales (llama.cpp's Q4_0, Q4_1 and Q8_0). Loaded as float32 they take two to six
times the memory without more information, and a step of few rows is bound by memory reads. The
original form is found from a weight's values, whatever file it came from. A weight that fits no
form stays float32.

Activations are float32 throughout. So are products and sums, except in matrix registers
(amx_float.h) and in the byte dot products of 4- and 8-bit weights (byte_dot.h).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from ctypes import CDLL, c_int64, c_void_p
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill_worker.engines.own.cpu.huge_pages import HugePageArena
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.linear import LinearKernels, PackedWeight, padded_bias
from tokenmill_worker.engines.own.cpu.kernels.program import Caller
from tokenmill_worker.engines.own.cpu.kernels.quantized import INT4_GROUP, Int4Packer
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

log = logging.getLogger(__name__)

BYTE_GROUP = 32
_WORDS = {"byte": "8 bits", "bf16": "bfloat16", "f16": "float16"}
_PROBED_ROWS = 16  # enough to rule out a form for most weights
_ROWS_AT_ONCE = 1024
_TINY = torch.finfo(torch.float32).tiny


class ExactPacker:
    """Packs a weight into its narrowest exact form: 4 bits, 8 bits, half precision, float32."""

    def __init__(
        self, kernels: LinearKernels, cache_dir: Path | None = None, march: str = "native"
    ) -> None:
        self.panel_width = kernels.panel_width
        self._kernels = kernels
        self._where = (cache_dir, march)
        self._call = Caller(cache_dir, march)
        self._arena = HugePageArena()

    @cached_property
    def _int4(self) -> Int4Packer:
        return Int4Packer(*self._where, self._kernels.uses_amx)

    def _library(self, form: str) -> CDLL:
        library = load(f"linear_{form}", *self._where)
        library.tokenmill_pack.restype = None
        return library

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """Pack `weight` `[n, k]`."""
        rows = weight.detach().float().contiguous()
        try:
            return self._narrow(rows, bias) or self._kernels.pack(rows, bias)
        except KernelUnavailableError as error:
            log.warning("A weight is kept in float32, although its file has fewer bits: %s", error)
            return self._kernels.pack(rows, bias)

    def _narrow(self, rows: Tensor, bias: Tensor | None) -> PackedWeight | None:
        if (affine := find_int4(rows)) is not None:
            return self._int4.pack_codes(*affine, bias)
        if (scaled := find_bytes(rows)) is not None:
            return self._pack_bytes(*scaled, bias)
        for form, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
            if rows.shape[1] % 2 == 0 and fits(rows, dtype):
                panels = self._arena.take(self._columns(rows.shape[0]) * rows.shape[1], dtype)
                return self._packed(form, (rows.to(dtype),), panels, None, bias)
        return None

    def _pack_bytes(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> PackedWeight:
        count = self._columns(codes.shape[0]) * codes.shape[1]
        panels = self._arena.take(count, torch.int8)
        lengths = 2 * self._columns(codes.shape[0])  # a float for each column, behind the scales
        scales = self._arena.take(count // BYTE_GROUP + lengths, torch.float16)
        return self._packed("byte", (codes, scale), panels, scales, bias)

    def _packed(
        self,
        form: str,
        source: tuple[Tensor, ...],
        panels: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
    ) -> PackedWeight:
        library, (n, k) = self._library(form), source[0].shape
        target = (panels,) if scales is None else (panels, scales)
        library.tokenmill_pack(
            *(c_void_p(part.data_ptr()) for part in (*source, *target)), c_int64(n), c_int64(k)
        )
        return PackedWeight(
            self._call, library, (n, k), panels, scales,
            padded_bias(bias, self.panel_width), _WORDS[form], self._kernels.uses_amx,
        )  # fmt: skip

    def _columns(self, n: int) -> int:
        return -(-n // self.panel_width) * self.panel_width


# The sign of a zero weight may be lost; it changes no sum that starts from zero.


def find_int4(rows: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Find 4-bit codes with scale · code + zero equal to `rows` `[n, k]` float32.

    Returns codes `[n, k]` in [0, 15], and scale and zero `[n, k / 32]` as half floats; None if
    there are none.
    """
    found = None if rows.shape[1] % INT4_GROUP else _in_parts(rows, _affine)
    return None if found is None else (found[0], found[1], found[2])


def _in_parts(
    rows: Tensor, find: Callable[[Tensor], tuple[Tensor, ...] | None]
) -> list[Tensor] | None:
    """Apply `find` to parts of the rows and concatenate what it returns.

    Returns None as soon as `find` does; in most such cases a few rows suffice.
    """
    if find(rows[:_PROBED_ROWS]) is None:
        return None
    parts = []
    for some in torch.split(rows, _ROWS_AT_ONCE):
        found = find(some)
        if found is None:
            return None
        parts.append(found)
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _affine(rows: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    groups = rows.reshape(-1, INT4_GROUP)
    codes, scale, zero = (torch.empty(0) for _ in range(3))
    left: Any = slice(None)  # the groups that no candidate fits yet: at first all, without a copy
    for candidate_scale, candidate_zero in _candidates(*torch.aminmax(groups, dim=1)):
        some, step, start = groups[left], candidate_scale[left], candidate_zero[left]
        wide, first = step.float()[:, None], start.float()[:, None]
        found = (some - first).div_(torch.where(wide == 0, _TINY, wide)).round_().clamp_(0, 15)
        narrow = found.to(torch.uint8)
        exact = (found.mul_(wide).add_(first) == some).all(dim=1)
        if isinstance(left, slice):
            codes, scale, zero = narrow, step.clone(), start  # the candidates go on with it
            left = (~exact).nonzero().flatten()
        else:
            hits = left[exact]
            codes[hits], scale[hits], zero[hits] = narrow[exact], step[exact], start[exact]
            left = left[~exact]
        if not len(left):
            by_row = (len(rows), -1)
            return codes.view(rows.shape), scale.view(by_row), zero.view(by_row)
    return None


def _candidates(low: Tensor, high: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and zeros that put a group's least and greatest weight a given number of codes
    apart.

    The zero is the least weight as in Q4_1, or −8 steps as in Q4_0, whose scale may be negative.
    """
    for steps in range(15, 0, -1):
        scale = ((high - low) / steps).half()
        yield scale, low.half()
        yield scale, -8 * scale
        yield -scale, 8 * scale


def find_bytes(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Find 8-bit codes with scale · code equal to `rows` `[n, k]` float32, each group reaching 127
    as in Q8_0.

    Returns codes `[n, k]` in [-127, 127] and half-precision scales `[n, k / 32]`; None if there are
    none.
    """
    found = None if rows.shape[1] % BYTE_GROUP else _in_parts(rows, _scaled)
    return None if found is None else (found[0], found[1])


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    groups = rows.reshape(len(rows), -1, BYTE_GROUP)
    scale = (groups.abs().amax(dim=-1) / 127).half()
    wide = scale.float()[..., None]
    codes = (groups / wide.clamp_min(_TINY)).round_().clamp_(-127, 127)
    if not torch.equal(codes * wide, groups):
        return None
    return codes.to(torch.int8).view(rows.shape), scale


def fits(rows: Tensor, dtype: torch.dtype) -> bool:
    """Return whether every weight of `[n, k]` float32 is exact in `dtype`; a NaN never is."""
    parts = (rows[:_PROBED_ROWS], *torch.split(rows, _ROWS_AT_ONCE))
    return all(torch.equal(part.to(dtype).float(), part) for part in parts)
