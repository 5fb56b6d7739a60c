"""A head that keeps only the highest output of each row finds what it finds when it stores them
all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.engines.own.cpu.kernels.layer import arguments_of, refuse
from tokenmill_worker.engines.own.cpu.kernels.argmax import ArgmaxOutputs
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.linear import LinearKernels, PackedWeight, Packer
from tokenmill_worker.engines.own.cpu.kernels.program import KernelCall, Program
from tokenmill_worker.engines.own.cpu.kernels.quantized import Int4Packer, Int8Packer
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

K = 64
Pack = Callable[..., PackedWeight]


@pytest.fixture(scope="module", params=["float32", "float32 without AMX", "8 bits", "4 bits"])
def pack(request: pytest.FixtureRequest) -> Pack:
    try:
        load("linear")
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    packers: dict[str, Callable[[], Packer]] = {
        "float32": LinearKernels,
        "float32 without AMX": lambda: LinearKernels(uses_amx=False),
        "8 bits": Int8Packer,
        "4 bits": Int4Packer,
    }
    return packers[request.param]().pack


class Head:
    def __init__(self, packed: PackedWeight, x: Tensor) -> None:
        self.x = x
        self.arguments, self.workspace = arguments_of(packed, x)
        self.argmax = ArgmaxOutputs()
        self.program = Program([KernelCall(packed.member, self.arguments), self.argmax.step])

    def run(self, threads: int) -> tuple[Tensor, Tensor]:
        found = self.argmax.ask(self.arguments, self.arguments.m, threads)
        self.program.run(threads, refuse)
        return found


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30))


@pytest.mark.parametrize("n", [7, 32, 200, 1501])
def test_the_head_returns_the_first_of_the_highest_outputs(pack: Pack, n: int) -> None:
    torch.manual_seed(n)
    weight, bias = torch.randn(n, K) / 8, torch.randn(n)
    weight[n // 2], bias[n // 2] = weight[n // 3], bias[n // 3]  # two that tie
    bias[n // 3] = bias[n // 2] = bias.max() + 1
    packed = pack(weight, bias)
    for m in (1, 3, 12, 33, 64):
        x = torch.randn(m, K)
        outputs = packed(x)
        for threads in (1, 2, 5):
            token_ids, peaks = Head(packed, x).run(threads)
            assert torch.equal(token_ids, outputs.argmax(dim=1)), (m, threads)
            assert torch.equal(peaks, outputs.amax(dim=1)), (m, threads)


def test_peaks_hold_nan_and_infinity(pack: Pack) -> None:
    packed = pack(torch.randn(300, K))
    x = torch.randn(5, K)
    x[1, 3], x[3, 7] = math.nan, math.inf
    outputs = packed(x)
    for threads in (1, 4):
        token_ids, peaks = Head(packed, x).run(threads)
        assert same(peaks, outputs.amax(dim=1))
        assert torch.isnan(peaks[1])
        fine = [0, 2, 4]
        assert torch.equal(token_ids[fine], outputs[fine].argmax(dim=1))


def test_results_stay_valid_for_two_more_calls(pack: Pack) -> None:
    packed = pack(torch.randn(100, K))
    x = torch.randn(4, K)
    head = Head(packed, x)
    first = head.run(2)
    kept = first[0].clone(), first[1].clone()
    x.copy_(torch.randn(4, K))
    head.run(2)
    outputs = torch.empty(4, 100)
    head.argmax.dismiss(head.arguments)
    head.arguments.y, head.arguments.y_stride = outputs.data_ptr(), 100
    head.program.run(2, refuse)
    assert torch.equal(outputs, packed(x))
    again = head.run(2)
    assert torch.equal(again[0], outputs.argmax(dim=1))
    assert torch.equal(first[0], kept[0])
    assert torch.equal(first[1], kept[1])
