"""Quantised products: exact where integers are exact, bound to float64 elsewhere; a row never
depends on its batch.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.engines.own.cpu.instruction_sets import skip_unless_runs
from tests.support.marks import long_unless
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.linear import Epilogue, LinearKernels, pack_gated
from tokenmill_worker.engines.own.cpu.kernels.quantized import (
    Int4Packer,
    Int8Packer,
    round_int4,
    round_int8,
)
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

ROWS = [1, 2, 5, 9, 13, 37]
# The best there is, AVX512 with VNNI, AVX512 without, AVX2 with VNNI, AVX2 without, and the
# narrowest
MARCHES = long_unless(
    {"native", "x86-64-v3", "x86-64"},
    ["native", "icelake-server", "x86-64-v4", "alderlake", "x86-64-v3", "x86-64"],
)


@pytest.fixture(scope="module", params=MARCHES)
def march(request):
    skip_unless_runs(request.param)
    try:
        load("linear_int8", None, request.param)
        load("linear_int4", None, request.param)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="module")
def int8(march):
    return Int8Packer(march=march)


@pytest.fixture(scope="module")
def int4(march):
    return Int4Packer(march=march, uses_amx=False)


def integers(*shape):
    """Weights: each row reaches 127, so that its scale is 1 and nothing is rounded."""
    values = torch.randint(-127, 128, shape).float()
    values[:, 0] = 127.0
    return values


def activations(*shape):
    """Each row spans 255 steps around zero, so that its scale is 1 and its zero 0."""
    values = torch.randint(-128, 128, shape).float()
    values[:, 0] = 127.0
    values[:, -1] = -128.0
    return values


# ── 8 bits ──


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(
    ("n", "k"), [(32, 16), (960, 576), (100, 33), (7, 5), (129, 64), (64, 2), (40, 1537)]
)
def test_integer_products_are_exact(int8, m, n, k):
    torch.manual_seed(m * n + k)
    weight, x = integers(n, k), activations(m, k)
    exact = x.long() @ weight.long().T
    assert torch.equal(int8.pack(weight)(x), exact.float())
    moved = (x + 1000).double() @ weight.double().T
    torch.testing.assert_close(
        int8.pack(weight)(x + 1000).double(), moved, rtol=1e-6, atol=0.02 * k**0.5
    )


def test_the_largest_integer_sums_do_not_overflow(int8):
    k = 65_536
    weight, x = torch.full((3, k), 127.0), torch.full((2, k), 127.0)
    x[:, 0] = -128.0
    x[1] = -1.0 - x[1]  # all at the lower end but one
    exact = x.double() @ weight.double().T
    assert torch.equal(int8.pack(weight)(x), exact.float())
    assert torch.equal(int8.pack(-weight)(x), -exact.float())
    with pytest.raises(ValueError, match="at most 65536 inputs, not 65537"):
        int8.pack(torch.zeros(1, k + 1))


@pytest.mark.parametrize("m", [1, 4, 30])
def test_int8_products_have_no_error_but_rounding(int8, m):
    """Against float64 products of the rounded values; the rounding itself is at most half a
    step.
    """
    torch.manual_seed(m)
    weight, bias, x = (
        torch.randn(100, 200),
        torch.randn(100),
        torch.randn(m, 200) * torch.rand(m, 1) * 9,
    )
    rounded, scale = round_int8(weight)
    assert ((rounded * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    low, high = x.amin(dim=1, keepdim=True).double(), x.amax(dim=1, keepdim=True).double()
    step = (high - low) / 255
    exact = (torch.round((x - low) / step) * step + low) @ (
        rounded.double() * scale.double()[:, None]
    ).T
    found = int8.pack(weight, bias)(x) - bias
    # one value of a row may be rounded to the other side of a tie
    assert ((found - exact).abs() <= step * scale.double() * 127 + 1e-4).all()
    assert ((found - x @ weight.T).abs() < 0.03 * (x @ weight.T).abs().max()).all()


def test_int8_epilogues_equal_the_separate_operations(int8):
    torch.manual_seed(3)
    weight, x, residual = integers(64, 40), activations(5, 40), torch.randn(5, 64)
    exact = x.double() @ weight.double().T
    packed = int8.pack(weight, torch.arange(64.0))
    assert torch.equal(
        packed(x, Epilogue.ADD, residual), exact.float() + torch.arange(64.0) + residual
    )
    gate, up = weight / 4096, weight.flip(1) / 64
    g, u = x.double() @ gate.double().T, x.double() @ up.double().T
    gated = pack_gated(int8, gate, up)
    torch.testing.assert_close(
        gated(x, Epilogue.SWIGLU).double(), F.silu(g) * u, rtol=1e-4, atol=1e-2
    )
    expected = F.gelu(g, approximate="tanh") * u
    torch.testing.assert_close(
        gated(x, Epilogue.GEGLU_TANH).double(), expected, rtol=1e-4, atol=1e-2
    )


def test_int8_rows_of_zeros_give_zeros_and_non_finite_rows_stay_non_finite(int8):
    x = torch.ones(5, 70)
    x[0] = 0.0
    x[1, 3], x[2, 69], x[3] = torch.nan, -torch.inf, torch.nan
    out = int8.pack(torch.ones(20, 70))(x)
    assert out[0].eq(0).all()
    assert not out[1:4].isfinite().any(), "an error must not be rounded away"
    torch.testing.assert_close(out[4], torch.full((20,), 70.0))
    assert int8.pack(torch.zeros(20, 70))(torch.ones(1, 70)).eq(0).all()


# ── 4 bits ──


def test_weights_in_q4_1_are_packed_exactly(int4):
    """The weights are as in GGUF's Q4_1: a half-precision scale and minimum per group of 32."""
    torch.manual_seed(1)
    codes = torch.randint(0, 16, (50, 4, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    scale, zero = torch.rand(50, 4).half() + 0.01, torch.randn(50, 4).half()
    weight = (codes * scale.float()[..., None] + zero.float()[..., None]).reshape(50, 128)
    found, found_scale, found_zero = round_int4(weight)
    assert torch.equal(found.reshape(50, 4, 32), codes.to(torch.uint8))
    assert torch.equal(found_scale, scale)
    assert torch.equal(found_zero, zero)


def test_the_error_of_rounding_to_4_bits_is_within_bounds():
    torch.manual_seed(2)
    weight = torch.randn(30, 256)
    codes, scale, zero = round_int4(weight)
    decoded = (
        codes.reshape(30, 8, 32) * scale.float()[..., None] + zero.float()[..., None]
    ).reshape(30, 256)
    plain = (weight.reshape(30, 8, 32).amax(-1) - weight.reshape(30, 8, 32).amin(-1)) / 15
    error = (decoded - weight).pow(2).mean()
    assert error < (plain**2 / 12).mean(), "no worse than rounding within the whole range"
    assert error > (plain**2 / 24).mean(), "4 bits cannot do this"


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), [(32, 32), (960, 576), (100, 64), (7, 96)])
def test_an_int4_product_equals_that_of_the_decoded_weights(int4, march, m, n, k):
    """Bit by bit that of the float32 kernel: both are the same chain of multiply-adds."""
    torch.manual_seed(m * n + k)
    weight, bias, x = torch.randn(n, k) / k**0.5, torch.randn(n), torch.randn(m, k)
    codes, scale, zero = (part.double() for part in round_int4(weight))
    decoded = (codes.reshape(n, -1, 32) * scale[..., None] + zero[..., None]).reshape(n, k)
    found = int4.pack(weight, bias)(x)
    torch.testing.assert_close(
        found.double(), x.double() @ decoded.T + bias.double(), rtol=2e-5, atol=2e-5
    )
    residual = torch.randn(m, n)
    added = int4.pack(weight, bias)(x, Epilogue.ADD, residual)
    torch.testing.assert_close(added, found + residual, rtol=1e-6, atol=1e-6)
    if march != "x86-64":  # without fused multiply-add the decoded weight is rounded once more
        assert torch.equal(
            found, LinearKernels(march=march, uses_amx=False).pack(decoded.float(), bias)(x)
        )


def test_int4_gates_equal_those_of_the_decoded_weights(int4):
    torch.manual_seed(4)
    gate, up, x = torch.randn(96, 64), torch.randn(96, 64), torch.randn(11, 64)
    decoded = []
    for weight in (gate, up):
        codes, scale, zero = (part.double() for part in round_int4(weight))
        decoded.append(
            (codes.reshape(96, 2, 32) * scale[..., None] + zero[..., None]).reshape(96, 64)
        )
    g, u = (x.double() @ weight.T for weight in decoded)
    found = pack_gated(int4, gate, up)(x, Epilogue.SWIGLU)
    torch.testing.assert_close(found.double(), F.silu(g) * u, rtol=1e-4, atol=1e-4)


def test_int4_refuses_inputs_that_do_not_fill_groups(int4):
    with pytest.raises(ValueError, match="multiple of 32 inputs, not 40"):
        int4.pack(torch.zeros(8, 40))


# ── both ──


def test_a_row_is_bitwise_the_same_in_every_batch(int8, int4):
    torch.manual_seed(0)
    weight, x = torch.randn(200, 96), torch.randn(50, 96)
    for packer in (int8, int4):
        packed = packer.pack(weight)
        alone = torch.cat([packed(x[i : i + 1]) for i in range(50)])
        for size in (2, 7, 25, 50):
            assert torch.equal(torch.cat([packed(part) for part in x.split(size)]), alone)


def test_quantized_products_are_the_same_with_any_number_of_threads(int8, int4):
    weight, x = torch.randn(200, 96), torch.randn(20, 96)
    threads = torch.get_num_threads()
    for packer in (int8, int4):
        packed = packer.pack(weight)
        try:
            torch.set_num_threads(1)
            alone = packed(x)
            torch.set_num_threads(3)
            assert torch.equal(packed(x), alone)
        finally:
            torch.set_num_threads(threads)
