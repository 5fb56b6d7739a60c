"""Packed linear layers against float64 products; a row never depends on its batch. Matrix
registers: test_amx.py.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.engines.own.cpu.instruction_sets import skip_unless_runs
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.linear import Epilogue, LinearKernels, pack_gated
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError


@pytest.fixture(scope="module", params=["native", "x86-64-v3", "x86-64"])
def kernels(request):
    """The machine's own instruction set, and the narrower forms that other machines take."""
    skip_unless_runs(request.param)
    try:
        load("linear", None, request.param)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    return LinearKernels(march=request.param, uses_amx=False)


def close(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("m", [1, 2, 5, 12, 13, 37, 64, 65, 131, 300])
@pytest.mark.parametrize(("n", "k"), [(32, 16), (960, 576), (100, 33), (7, 5), (129, 64)])
def test_a_packed_product_equals_the_float64_product(kernels, m, n, k):
    torch.manual_seed(m * n + k)
    weight, bias, x = torch.randn(n, k) / k**0.5, torch.randn(n), torch.randn(m, k)
    packed = kernels.pack(weight, bias)
    close(packed(x), x.double() @ weight.double().T + bias.double())
    residual = torch.randn(m, n)
    close(
        packed(x, Epilogue.ADD, residual),
        x.double() @ weight.double().T + bias.double() + residual.double(),
    )


@pytest.mark.parametrize("m", [1, 3, 40, 140])
def test_gated_epilogues_equal_the_separate_operations(kernels, m):
    torch.manual_seed(m)
    gate, up, x = torch.randn(96, 48), torch.randn(96, 48), torch.randn(m, 48)
    packed = pack_gated(kernels, gate, up)
    g, u = x.double() @ gate.double().T, x.double() @ up.double().T
    torch.testing.assert_close(
        packed(x, Epilogue.SWIGLU).double(), F.silu(g) * u, rtol=1e-4, atol=1e-4
    )
    expected = F.gelu(g, approximate="tanh") * u
    torch.testing.assert_close(
        packed(x, Epilogue.GEGLU_TANH).double(), expected, rtol=1e-4, atol=1e-4
    )


def test_extreme_gates_stay_finite(kernels):
    width = kernels.panel_width // 2
    gate, up = torch.full((width, 1), 1e4), torch.ones(width, 1)
    packed = pack_gated(kernels, gate, up)
    out = packed(torch.tensor([[1.0], [-1.0]]), Epilogue.SWIGLU)
    assert out[0].eq(1e4).all()
    assert out[1].abs().max() < 1e-20


def test_a_row_is_bitwise_the_same_in_every_batch(kernels):
    torch.manual_seed(0)
    packed, x = kernels.pack(torch.randn(200, 96)), torch.randn(250, 96)
    alone = torch.cat([packed(x[i : i + 1]) for i in range(250)])
    for size in (2, 7, 50, 64, 101, 250):
        together = torch.cat([packed(part) for part in x.split(size)])
        assert torch.equal(together, alone)


def test_products_of_strided_rows_are_exact(kernels):
    x = torch.randn(6, 80)[:, :40]
    weight = torch.randn(64, 40)
    close(kernels.pack(weight)(x), x.double() @ weight.double().T)


@pytest.mark.parametrize("k", [5, 64, 576])
def test_rms_norm_equals_its_float64_definition(kernels, k):
    x, weight, residual = torch.randn(9, k), torch.randn(k), torch.randn(9, k)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    close(kernels.rms_norm(x, weight, 1e-5), exact * weight.double())
    close(
        kernels.rms_norm(x, weight, 1e-5, 1.0, residual),
        exact * (1 + weight.double()) + residual.double(),
    )
