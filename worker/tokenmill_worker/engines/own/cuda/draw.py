"""Samples a batch's tokens on a CUDA device in two or three launches, straight from the model's
logits.

It chooses the same tokens as `noise.py` and `truncation.py` do with torch's operators, which sort
whole rows and read them a dozen times. It never synchronises with the device, and a row's token
does not depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from tokenmill_worker.engines.own.cuda.draw_cut import choose_kernel, gather_kernel
from tokenmill_worker.engines.own.cuda.draw_kernel import (
    NUMBERS,
    measure_kernel,
    pick_kernel,
    race_kernel,
)
from tokenmill_worker.engines.own.sampling.draws import SamplingArrays
from tokenmill_worker.engines.own.sampling.transfer import to_device

CHUNK = 4096
WARPS = 8
CHOOSE_WARPS = 16  # of the program that chooses among a row's candidates
TILE = 2048
CANDIDATES = 768  # tokens above the cut, if logits have a normal distribution


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch's parameters on the device, and which of the three kinds of rows it has."""

    scale: Tensor
    log_min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    has_greedy: bool
    has_plain: bool
    has_cut: bool

    @classmethod
    def of(cls, arrays: SamplingArrays, vocab: int, device: torch.device) -> _Batch:
        is_greedy = arrays.inverse_temperature == 0.0
        is_cut = ~is_greedy & ((arrays.top_k < vocab) | (arrays.top_p < 1.0))
        return cls(
            scale=to_device(arrays.inverse_temperature, device),
            log_min_p=to_device(arrays.log_min_p, device),
            top_p=to_device(arrays.top_p, device),
            top_k=to_device(arrays.top_k, device),
            has_greedy=bool(is_greedy.any()),
            has_plain=not (is_greedy | is_cut).all(),
            has_cut=bool(is_cut.any()),
        )


class DeviceDraw:
    """Samples from logits of any type by Triton kernels; only one thread may use an instance.

    It keeps the last batch's parameters on the device.
    """

    takes_any_dtype = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: SamplingArrays | None = None
        self._batch: _Batch | None = None
        self._keys: npt.NDArray[np.int32] | None = None
        self._keys_there: Tensor | None = None

    def draw(
        self, logits: Tensor, arrays: SamplingArrays, keys: npt.NDArray[np.int32]
    ) -> tuple[Tensor, Tensor]:
        """Return token ids `[rows]` int64 and each row's highest logit, which is finite in a good
        row.
        """
        num_rows, vocab = logits.shape
        token_ids = self._empty(num_rows, dtype=torch.int64)
        peaks = self._empty(num_rows)
        if num_rows == 0:
            return token_ids, peaks
        if self._batch is None or arrays is not self._arrays:
            self._batch = _Batch.of(arrays, vocab, self._device)
            self._arrays = arrays
        if keys is not self._keys:  # greedy rows pass the same object each time
            self._keys, self._keys_there = keys, to_device(np.ascontiguousarray(keys), self._device)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        self._launch(logits, self._batch, token_ids, peaks)
        return token_ids, peaks

    def _launch(self, logits: Tensor, batch: _Batch, token_ids: Tensor, peaks: Tensor) -> None:
        (num_rows, vocab), stride = logits.shape, logits.stride(0)
        chunks = triton.cdiv(vocab, CHUNK)
        sizes = {"CHUNK": CHUNK, "CHUNKS_PAD": triton.next_power_of_2(chunks)}
        numbers = self._empty(num_rows, NUMBERS.value, chunks)
        found = self._empty(num_rows, dtype=torch.int32)
        measure_kernel[(chunks, num_rows)](
            logits, batch.scale, batch.top_p, batch.top_k, numbers, found, vocab, stride,
            CHUNK=CHUNK, num_warps=WARPS,
        )  # fmt: skip
        winners = self._empty(num_rows, chunks, dtype=torch.int32)
        if batch.has_plain:
            race_kernel[(chunks, num_rows)](
                logits, batch.scale, batch.log_min_p, batch.top_p, batch.top_k, self._keys_there,
                numbers, winners, vocab, stride, **sizes, num_warps=WARPS,
            )  # fmt: skip
        if batch.has_plain or batch.has_greedy:
            pick_kernel[(num_rows,)](
                logits, batch.scale, batch.top_p, batch.top_k, numbers, winners, token_ids, peaks,
                vocab, stride, chunks, **sizes, num_warps=WARPS,
            )  # fmt: skip
        if batch.has_cut:
            kept = self._empty(num_rows, TILE, dtype=torch.int32)
            deviations = deviations_of_cut(vocab)
            gather_kernel[(chunks, num_rows)](
                logits, batch.scale, batch.log_min_p, batch.top_p, batch.top_k, numbers, found,
                kept, vocab, stride, deviations, **sizes, TILE=TILE, num_warps=WARPS,
            )  # fmt: skip
            choose_kernel[(num_rows,)](
                logits, batch.scale, batch.log_min_p, batch.top_p, batch.top_k, self._keys_there,
                numbers, found, kept, token_ids, peaks, vocab, stride, deviations, chunks,
                CHUNKS_PAD=sizes["CHUNKS_PAD"], TILE=TILE, num_warps=CHOOSE_WARPS,
            )  # fmt: skip

    def _empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)


@cache
def deviations_of_cut(vocab: int) -> float:
    """Return how many standard deviations the cut lies above the mean of the logits."""
    return NormalDist().inv_cdf(1.0 - min(CANDIDATES / vocab, 0.5))
