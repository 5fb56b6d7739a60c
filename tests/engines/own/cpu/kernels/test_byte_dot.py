"""Byte dot products (byte_dot.h) are as exact as float32, whatever the batch."""

from ctypes import c_int64

import pytest
import torch

from tests.engines.own.cpu.kernels.test_amx import EPSILON, assert_fused, error_of
from tests.engines.own.cpu.kernels.test_exact_pack import FORMS
from tokenmill_worker.engines.own.cpu.kernels.exact_pack import ExactPacker
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.linear import LinearKernels
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 64, 65, 66, 131, 300]
SOURCES = {"4 bits": "linear_int4", "8 bits": "linear_byte"}
DEPTHS = [96, 288]


@pytest.fixture(scope="module")
def packer() -> ExactPacker:
    try:
        return ExactPacker(LinearKernels())
    except KernelUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=SOURCES)
def form(request: pytest.FixtureRequest, packer: ExactPacker) -> str:
    name: str = request.param
    if not rows_of(name):
        pytest.skip(
            f"{name} are multiplied otherwise here: no AVX512 VNNI and VBMI, or matrix registers "
            "(AMX)"
        )
    return name


def rows_of(form: str) -> list[int]:
    """Return the row counts that are multiplied as byte dot products.

    These are all counts, or only small ones if matrix registers (AMX) multiply the others.
    """
    most_rows = load(SOURCES[form]).tokenmill_dot_rows
    most_rows.restype = c_int64
    most = most_rows()
    return [m for m in ROWS if m <= most]


@pytest.mark.parametrize(("n", "k"), [(64, 32), (200, 576), (103, 96), (70, 4192)])
def test_a_product_is_as_exact_as_a_chain_of_float32(
    packer: ExactPacker, form: str, n: int, k: int
) -> None:
    torch.manual_seed(n)
    weight = FORMS[form](n, k)
    packed, chains = packer.pack(weight), LinearKernels(uses_amx=False).pack(weight)
    assert packed.form == form
    for m in rows_of(form):
        x = torch.randn(m, k)
        error = error_of(packed, weight, x)
        assert error < 6.0, m
        # rounding a group's sums weighs more in few groups
        assert k < 100 or error < error_of(chains, weight, x) + 0.5, m
        assert not torch.equal(packed(x), chains(x)), "these are the chains themselves"


@pytest.mark.parametrize("k", DEPTHS)
def test_a_row_is_bitwise_the_same_in_every_batch(packer: ExactPacker, form: str, k: int) -> None:
    """… and on any number of threads, whether each of them rounds all rows or its share."""
    torch.manual_seed(8)
    rows = rows_of(form)
    packed, x = packer.pack(FORMS[form](200, k)), torch.randn(rows[-1], k)
    together, threads = packed(x), torch.get_num_threads()
    assert torch.equal(torch.cat([packed(row) for row in x.split(1)]), together)
    for size in rows:
        assert torch.equal(packed(x[:size]), together[:size]), size
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for size in rows:
                assert torch.equal(packed(x[:size]), together[:size]), (count, size)
    finally:
        torch.set_num_threads(threads)


def test_byte_product_epilogues_equal_the_separate_operations(
    packer: ExactPacker, form: str
) -> None:
    torch.manual_seed(1)
    assert_fused(packer, form, rows_of(form))


def test_numbers_far_below_their_group_s_greatest_are_rounded_within_bounds(
    packer: ExactPacker, form: str
) -> None:
    """They are rounded beside it, to a half of 2^-22 of it at worst; groups without it lose nothing
    to it.
    """
    torch.manual_seed(9)
    for m in rows_of(form):
        weight, x = FORMS[form](200, 576), torch.randn(m, 576)
        x[:, ::50] *= 1e4
        x[:, 64:96] *= 1e-6
        packed = packer.pack(weight)
        greatest = (
            x.abs().view(m, -1, 32).amax(dim=-1).double()
            @ weight.abs().view(200, -1, 32).sum(dim=-1).double().T
        )
        sums = x.double().abs() @ weight.double().abs().T
        error = (packed(x).double() - x.double() @ weight.double().T).abs()
        assert (error < EPSILON * (2.0 * greatest + 6.0 * sums)).all(), m
        small = torch.zeros(m, 576)
        small[:, 64:96] = x[:, 64:96]
        assert error_of(packed, weight, small) < 6.0, m


@pytest.mark.parametrize("k", [32, 512])
def test_a_group_s_greatest_just_below_a_power_of_two_is_exact(
    packer: ExactPacker, form: str, k: int
) -> None:
    """The greatest number's highest byte is at its limit, and so are the weights' codes."""
    torch.manual_seed(12)
    weight, x = FORMS[form](64, k), torch.rand(4096, k) - 0.5
    greatest = 2.0 - torch.arange(4096) / 65_536
    x[:, 7] = torch.where(torch.arange(4096) % 2 == 0, greatest, -greatest)
    packed, most = packer.pack(weight), rows_of(form)[-1]
    beside_greatest = 2.0 * weight[:, :32].double().abs().sum(dim=-1)
    sums = x.double().abs() @ weight.double().abs().T
    for size in {1, most}:
        error = (
            torch.cat([packed(rows) for rows in x.split(size)]).double()
            - x.double() @ weight.double().T
        )
        assert (error.abs() < EPSILON * (3.0 * beside_greatest + 6.0 * sums)).all(), size


@pytest.mark.parametrize("k", [64, 512])
def test_the_greatest_possible_sums_do_not_overflow(packer: ExactPacker, form: str, k: int) -> None:
    """All codes at one end and all numbers at theirs: what is least away from more than 32 bits
    hold.
    """
    least, most = {"4 bits": (-8.0, 7.0), "8 bits": (-127.0, 127.0)}[form]
    weight = torch.full((64, k), least)
    weight[:, ::32] = most  # so that a group has a range,
    if form == "8 bits":
        weight[:, 1::32], weight[:, 2::32] = 1.0, 50.0  # and no narrower one
    packed = packer.pack(weight)
    assert packed.form == form
    for m in rows_of(form):
        for sign in (1.0, -1.0):
            x = torch.full((m, k), sign * (2.0 - 2.0**-7))
            assert error_of(packed, weight, x) < 6.0, (m, sign)


@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("size", [1e-28, 1e-10, 1e15, 1e30])
def test_byte_products_of_large_and_small_numbers_are_exact(
    packer: ExactPacker, form: str, size: float, k: int
) -> None:
    torch.manual_seed(10)
    weight = FORMS[form](64, k)
    packed = packer.pack(weight)
    for m in rows_of(form):
        assert error_of(packed, weight, torch.randn(m, k) * size) < 6.0, m
        assert packed(torch.zeros(m, k)).eq(0).all()
        assert packed(torch.full((m, k), 1e-41)).abs().max() < 1e-36


@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_does_not_affect_the_others(
    packer: ExactPacker, form: str, bad: float, k: int
) -> None:
    torch.manual_seed(11)
    packed = packer.pack(FORMS[form](96, k))
    for m in (3, *(size for size in rows_of(form) if size > 3)):
        x = torch.randn(m, k)
        clean, spoilt = packed(x), x.clone()
        spoilt[1, 40] = bad
        found = packed(spoilt)
        assert not found[1].isfinite().any()
        assert torch.equal(found[:1], clean[:1])
        assert torch.equal(found[2:], clean[2:])
