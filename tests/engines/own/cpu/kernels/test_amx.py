"""Products in the matrix registers are as exact as float32, whatever the batch."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.engines.own.cpu.kernels.test_exact_pack import FORMS
from tokenmill_worker.engines.own.cpu.kernels.exact_pack import ExactPacker
from tokenmill_worker.engines.own.cpu.kernels.linear import (
    Epilogue,
    LinearKernels,
    PackedWeight,
    pack_gated,
)
from tokenmill_worker.engines.own.cpu.kernels.quantized import Int8Packer
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

ROWS = [49, 64, 65, 80, 97, 130, 300]  # more than the chains of any form take
FEW_ROWS = [9, 15, 16, 17, 31, 32, 33, 40, 48]  # of the narrow forms alone
FEWER_ROWS = {"4 bits": [5, 8], "8 bits": [6, 8], "bfloat16": [5, 8]}  # those of one form
EPSILON = 2.0**-24


@pytest.fixture(scope="module")
def packer() -> ExactPacker:
    try:
        kernels = LinearKernels()
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    if not kernels.has_amx:
        pytest.skip("this CPU has no matrix registers (AMX)")
    return ExactPacker(kernels)


def error_of(packed: PackedWeight, weight: Tensor, x: Tensor) -> float:
    """Return the largest error, in units of rounding the sum of all magnitudes once."""
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    return float(((packed(x).double() - exact).abs() / (size * EPSILON + 1e-30)).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(64, 32), (200, 576), (103, 96), (70, 4192)])
def test_a_product_is_as_exact_as_a_chain_of_float32(
    packer: ExactPacker, form: str, n: int, k: int
) -> None:
    """A part that was left out would show: its errors are tens of roundings."""
    torch.manual_seed(n)
    weight = FORMS[form](n, k)
    packed, chains = packer.pack(weight), LinearKernels(uses_amx=False).pack(weight)
    assert packed.form == form
    for m in ROWS if form == "float32" else ROWS + FEW_ROWS + FEWER_ROWS.get(form, []):
        x = torch.randn(m, k)
        error = error_of(packed, weight, x)
        assert error < 6.0, m
        assert error < error_of(chains, weight, x) + 0.5, m
        assert not torch.equal(packed(x), chains(x)) or form == "bfloat16", (
            "these are not the matrix registers"
        )


def assert_fused(packer: ExactPacker, form: str, rows: Sequence[int]) -> None:
    """Bias, residual and gates stand behind the product, also of rows with a stride of their
    own.
    """
    weight, bias = FORMS[form](100, 64), torch.randn(100)
    packed = packer.pack(weight, bias)
    gate, up = FORMS[form](96, 64), FORMS[form](96, 64)
    gated = pack_gated(packer, gate, up)
    assert packed.form == form
    for m in rows:
        x, residual = torch.randn(m, 2 * 64)[:, :64], torch.randn(m, 100)
        wide = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(packed(x).double(), wide, rtol=1e-5, atol=1e-5)
        found = packed(x, Epilogue.ADD, residual).double()
        torch.testing.assert_close(found, wide + residual.double(), rtol=1e-5, atol=1e-5)
        g, u = x.double() @ gate.double().T, x.double() @ up.double().T
        silu = torch.nn.functional.silu(g) * u
        torch.testing.assert_close(gated(x, Epilogue.SWIGLU).double(), silu, rtol=1e-4, atol=1e-4)


def test_amx_epilogues_equal_the_separate_operations(packer: ExactPacker) -> None:
    torch.manual_seed(1)
    assert_fused(packer, "float32", ROWS)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_bitwise_the_same_in_every_batch_of_many(packer: ExactPacker, form: str) -> None:
    """… and on any number of threads."""
    torch.manual_seed(2)
    packed, x = packer.pack(FORMS[form](200, 96)), torch.randn(300, 96)
    together, threads = packed(x), torch.get_num_threads()
    for size in ROWS:
        assert torch.equal(packed(x[:size]), together[:size]), size
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(packed(x), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_parts_left_out_of_an_amx_product_are_zero(packer: ExactPacker, form: str) -> None:
    """Weights in half precision give the bits of the same weights in float32."""
    torch.manual_seed(3)
    weight, x = FORMS[form](200, 576), torch.randn(131, 576)
    assert torch.equal(packer.pack(weight)(x), LinearKernels().pack(weight)(x))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_not_finite_does_not_affect_the_others(
    packer: ExactPacker, form: str
) -> None:
    torch.manual_seed(4)
    packed, x = packer.pack(FORMS[form](96, 64)), torch.randn(70, 64)
    clean = packed(x)
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoilt = x.clone()
        spoilt[5, 40] = bad
        found = packed(spoilt)
        assert not found[5].isfinite().any()
        assert torch.equal(found[:5], clean[:5])
        assert torch.equal(found[6:], clean[6:])
    weird = x.clone()
    # a NaN that rounding its bits up would turn into −0
    weird.view(torch.int32)[5, 40] = 0x7FFFFFFF
    assert packed(weird)[5].isnan().all()


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e15, 1e30])
def test_amx_products_of_large_and_small_numbers_are_exact(
    packer: ExactPacker, size: float
) -> None:
    """Parts of a number may lie far below it; what is below the smallest normal number counts as
    zero.
    """
    torch.manual_seed(5)
    weight, x = torch.randn(64, 96), torch.randn(70, 96)
    assert error_of(packer.pack(weight), weight, x * size) < 2.0
    assert error_of(packer.pack(weight * size), weight * size, x) < 2.0
    assert packer.pack(weight)(torch.full((70, 96), 1e-41)).abs().max() < 1e-36


# ── integers ──


def test_integer_products_are_the_same_with_and_without_amx(packer: ExactPacker) -> None:
    torch.manual_seed(6)
    for n, k in ((96, 64), (200, 576), (70, 4160), (33, 100)):
        weight = torch.randn(n, k)
        with_amx, without = Int8Packer().pack(weight), Int8Packer(uses_amx=False).pack(weight)
        for m in (1, 11, 12, 16, 17, 33, 64, 65, 130):
            x = torch.randn(m, k)
            assert torch.equal(with_amx(x), without(x)), (n, k, m)


def test_inputs_that_do_not_fill_a_register_use_vector_chains(packer: ExactPacker) -> None:
    torch.manual_seed(7)
    weight, x = torch.randn(64, 72), torch.randn(100, 72)
    assert torch.equal(packer.pack(weight)(x), LinearKernels(uses_amx=False).pack(weight)(x))
