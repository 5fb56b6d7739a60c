"""Chooses the kernel that packs each weight: float32, or a quantised form that supports the
weight's shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenmill_worker.engines.own.config import Quantization
from tokenmill_worker.engines.own.cpu.kernels.exact_pack import ExactPacker
from tokenmill_worker.engines.own.cpu.kernels.linear import LinearKernels, PackedWeight, Packer
from tokenmill_worker.engines.own.cpu.kernels.quantized import (
    INT4_GROUP,
    MAX_INT8_DEPTH,
    Int4Packer,
    Int8Packer,
)


@dataclass(frozen=True, slots=True)
class Packing:
    """Kernels and packers of one model.

    `kernels` run the norms. Replacements are compared with the original through `exact`, whose
    results are those of float32 weights. The model then runs on `body`; `head` computes the logits.
    """

    kernels: LinearKernels
    exact: Packer
    body: Packer
    head: Packer

    @classmethod
    def choose(
        cls, quantization: Quantization | None, narrow: bool = True, amx: bool = True
    ) -> Packing:
        """Choose the packers for a quantisation.

        Raises KernelUnavailableError where the kernels cannot be compiled.

        Args:
            narrow: keep weights in a narrower form where that restores them bit for bit.
            amx: use the CPU's matrix registers.
        """
        kernels = LinearKernels(uses_amx=amx)
        exact = ExactPacker(kernels) if narrow else kernels
        if quantization is None:
            return cls(kernels, exact, exact, exact)
        int8 = _Fitting(kernels, Int8Packer(uses_amx=amx))
        # The head of a small model holds a fifth of its weights and decides each token: it keeps 8
        # bits.
        return cls(
            kernels,
            kernels,
            int8 if quantization == "int8" else _Fitting(int8, Int4Packer(uses_amx=amx)),
            int8,
        )

    @property
    def is_exact(self) -> bool:
        return self.body is self.exact


class _Fitting:
    """Packs weights through `packer` where their shape allows it, and through `otherwise` where
    not.
    """

    def __init__(self, otherwise: Packer, packer: Int8Packer | Int4Packer) -> None:
        self.panel_width = packer.panel_width
        self._otherwise, self._packer = otherwise, packer

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        depth = weight.shape[1]
        fits = (
            depth % INT4_GROUP == 0
            if isinstance(self._packer, Int4Packer)
            else depth <= MAX_INT8_DEPTH
        )
        return (self._packer if fits else self._otherwise).pack(weight, bias)
