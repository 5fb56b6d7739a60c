"""Samples a batch's tokens on a CUDA device in one launch, straight from the model's logits.

It chooses the same tokens as `noise.py` and `truncation.py` do with torch's operators, which sort
whole rows and read them a dozen times. It never synchronises with the device, and a row's token
does not depend on its batch.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenmill_worker.engine.cuda.draw_kernel import draw_kernel
from tokenmill_worker.engine.sampling.draws import SamplingArrays
from tokenmill_worker.engine.sampling.transfer import to_device

TILE = 4096
WARPS = 8
CANDIDATES = 1024  # that the cut leaves of logits with a normal distribution


class DeviceDraw:
    """Samples from logits of any type by the Triton kernel; only one thread may use an instance.

    It keeps the last batch's parameters on the device.
    """

    takes_any_dtype = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: SamplingArrays | None = None
        self._parameters: tuple[Tensor, ...] = ()
        self._keys: npt.NDArray[np.int32] | None = None
        self._keys_there: Tensor | None = None

    def draw(
        self, logits: Tensor, arrays: SamplingArrays, keys: npt.NDArray[np.int32]
    ) -> tuple[Tensor, Tensor]:
        """Return token ids `[rows]` int64 and each row's highest logit, which is finite in a good
        row.
        """
        num_rows, vocab = logits.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        peaks = torch.empty(num_rows, dtype=torch.float32, device=self._device)
        if num_rows == 0:
            return token_ids, peaks
        if arrays is not self._arrays:
            numbers = (arrays.inverse_temperature, arrays.log_min_p, arrays.top_p, arrays.top_k)
            self._parameters = tuple(to_device(array, self._device) for array in numbers)
            self._arrays = arrays
        if keys is not self._keys:  # greedy rows pass the same object each time
            self._keys, self._keys_there = keys, to_device(np.ascontiguousarray(keys), self._device)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        tile = min(TILE, 1 << (vocab - 1).bit_length())
        num_cut = num_rows if _has_cuts(arrays, vocab) else 0
        kept = torch.empty((num_cut, tile), dtype=torch.float32, device=self._device)
        kept_tokens = torch.empty((num_cut, tile), dtype=torch.int32, device=self._device)
        draw_kernel[(num_rows,)](
            logits, *self._parameters, self._keys_there, kept, kept_tokens, token_ids, peaks,
            vocab, logits.stride(0), deviations_of_cut(vocab),
            TILE=tile, num_warps=WARPS,
        )  # fmt: skip
        return token_ids, peaks


def _has_cuts(arrays: SamplingArrays, vocab: int) -> bool:
    """Return whether a row has top-k or top-p."""
    return bool(((arrays.top_k < vocab) | (arrays.top_p < 1.0)).any())


@cache
def deviations_of_cut(vocab: int) -> float:
    """Return how many deviations over the mean the cut lies."""
    return NormalDist().inv_cdf(1.0 - min(CANDIDATES / vocab, 0.5))
