"""A linear layer whose rows go through a norm first gives what the norm and then the layer give,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.engines.own.cpu.instruction_sets import skip_unless_runs
from tests.engines.own.cpu.kernels.layer import arguments_of, refuse
from tokenmill_worker.engines.own.cpu.kernels.exact_pack import ExactPacker
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.linear import LinearKernels, PackedWeight
from tokenmill_worker.engines.own.cpu.kernels.program import KernelCall, Program
from tokenmill_worker.engines.own.cpu.kernels.quantized import Int4Packer, Int8Packer
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

N, K = 200, 192
EPS, OFFSET = 1e-5, 1.0


def make(form: str, march: str, uses_amx: bool) -> tuple[LinearKernels, PackedWeight]:
    weight = torch.randn(N, K) / K**0.5
    kernels = LinearKernels(march=march, uses_amx=uses_amx)
    makers: dict[str, Callable[[], PackedWeight]] = {
        "float32": lambda: kernels.pack(weight),
        "bfloat16": lambda: ExactPacker(kernels, march=march).pack(weight.bfloat16().float()),
        "8 bits": lambda: Int8Packer(march=march, uses_amx=uses_amx).pack(weight),
        "4 bits": lambda: Int4Packer(march=march, uses_amx=uses_amx).pack(weight),
    }
    packed = makers[form]()
    assert packed.form == form
    return kernels, packed


def behind_norm(packed: PackedWeight, x: Tensor, norm: Tensor, threads: int) -> Tensor:
    y = torch.empty(x.shape[0], N)
    arguments, _workspace = arguments_of(packed, x)
    arguments.y, arguments.y_stride = y.data_ptr(), y.stride(0)
    arguments.norm, arguments.norm_eps, arguments.norm_offset = norm.data_ptr(), EPS, OFFSET
    Program([KernelCall(packed.member, arguments)]).run(threads, refuse)
    return y


@pytest.mark.parametrize("uses_amx", [True, False])
@pytest.mark.parametrize("march", ["native", "x86-64-v3", "x86-64"])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "8 bits", "4 bits"])
def test_a_layer_with_a_fused_norm_equals_norm_then_layer_bit_for_bit(
    form: str, march: str, uses_amx: bool
) -> None:
    skip_unless_runs(march)
    try:
        load("linear", None, march)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    torch.manual_seed(1)
    kernels, packed = make(form, march, uses_amx)
    norm = torch.rand(K)
    for m in (1, 3, 4, 11, 33, 64, 65, 200):
        x = torch.randn(m, 2 * K)[:, :K]
        expected = packed(kernels.rms_norm(x, norm, EPS, OFFSET))
        for threads in (1, 2, 5):
            assert torch.equal(behind_norm(packed, x, norm, threads), expected), (m, threads)
