"""A head in 8 bits that looks at the highest bytes first finds what it finds when it stores all
outputs.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.engines.own.cpu.kernels.test_argmax import Head, same
from tests.engines.own.cpu.kernels.test_byte_dot import rows_of
from tests.engines.own.cpu.kernels.test_exact_pack import q8_0
from tokenmill_worker.engines.own.cpu.kernels.exact_pack import ExactPacker
from tokenmill_worker.engines.own.cpu.kernels.linear import LinearKernels, PackedWeight
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

K = 576
ROWS = [2, 4, 5, 6, 7, 8, 33, 64]


@pytest.fixture(scope="module")
def packer() -> ExactPacker:
    """Return the packer, or skip: without its instructions the head computes all of its outputs."""
    try:
        return ExactPacker(LinearKernels())
    except KernelUnavailableError as error:
        pytest.skip(str(error))


def head(packer: ExactPacker, weight: Tensor) -> PackedWeight:
    packed = packer.pack(weight)
    assert packed.form == "8 bits"
    return packed


def check(packed: PackedWeight, x: Tensor) -> None:
    outputs = packed(x)
    for threads in (1, 2, 5):
        token_ids, peaks = Head(packed, x).run(threads)
        assert torch.equal(token_ids, outputs.argmax(dim=1)), (len(x), threads)
        assert torch.equal(peaks, outputs.amax(dim=1)), (len(x), threads)


def by_highest_bytes(x: Tensor) -> Tensor:
    """Return the numbers without their lower bytes."""
    groups = x.view(len(x), -1, 32)
    unit = 2.0 ** (groups.abs().amax(dim=-1, keepdim=True).log2().floor() + 1 - 23)
    return (((groups / unit + 0x8080) / 65_536).floor() * 65_536 * unit).view(x.shape)


@pytest.mark.parametrize("n", [7, 32, 200, 5000])
def test_the_byte_head_returns_the_first_of_the_highest_outputs(
    packer: ExactPacker, n: int
) -> None:
    torch.manual_seed(n)
    weight = q8_0(n, K)
    weight[n // 2] = weight[n // 3]  # two that tie
    packed = head(packer, weight)
    for m in ROWS:
        x = torch.randn(m, K)
        x[0] = weight[n // 3] * 3.0
        assert packed(x)[0].argmax() == n // 3
        check(packed, x)


def test_outputs_that_differ_in_lower_bytes_only_are_ordered_exactly(packer: ExactPacker) -> None:
    """Columns near each other, as those of rare tokens are: by the highest bytes alone they are all
    the same.
    """
    torch.manual_seed(1)
    codes = torch.randint(-126, 127, (K // 32, 32)).float()
    codes[:, 0] = 127.0
    # a group's codes add up to the same in every column
    apart = torch.cat([torch.ones(15), -torch.ones(15)])
    moves = torch.stack([apart[torch.randperm(30)] for _ in range(1000 * K // 32)]).view(
        1000, K // 32, 30
    )
    weight = codes.repeat(1000, 1, 1)
    weight[..., 1:31] += moves
    packed = head(packer, weight.view(1000, K) / 64)
    for m in ROWS:
        x = (80 * 65_536 + torch.randint(-32_000, 32_000, (m, K))) * 2.0**-23
        coarse = by_highest_bytes(x) @ weight.view(1000, K).T
        assert (coarse == coarse[:, :1]).all()
        assert packed(x).argmax(dim=1).unique().numel() > m / 2
        check(packed, x)


def test_outputs_that_lie_in_the_lower_bytes_alone_are_counted_at_their_largest(
    packer: ExactPacker,
) -> None:
    """The last column's output is in the lower bytes alone, as great as they come and each of its
    weight's sign.
    """
    torch.manual_seed(4)
    weight = q8_0(300, K) * 2.0**-6
    weight[299] = 127.0
    highest = torch.tensor([80.0, -80.0]).repeat(K // 2)
    x = ((highest * 65_536 + 32_000) * 2.0**-23).repeat(6, 1)
    scale = torch.tensor(0.97 * 2 * 32_000 / (80 * 65_536 + 32_000)).half().float()
    weight[0] = 127.0 * scale * (highest > 0)
    packed = head(packer, weight)
    outputs = packed(x)
    assert (outputs[:, 0] / outputs[:, 299]).sub(0.97).abs().max() < 0.001
    assert ((by_highest_bytes(x) @ weight.T).argmax(dim=1) == 0).all()
    check(packed, x)


def test_rows_of_nan_infinity_or_zeros_have_the_peaks_of_all_outputs(packer: ExactPacker) -> None:
    torch.manual_seed(2)
    packed, x = head(packer, q8_0(300, K)), torch.randn(9, K)
    x[1, 3], x[3, 7], x[4], x[5], x[6] = math.nan, math.inf, 0.0, x[5] * 1e-38, x[6] * 1e-30
    x[7, :32], x[8] = x[7, :32] * 1e20, x[8] * 1e30
    outputs = packed(x)
    for threads in (1, 4):
        token_ids, peaks = Head(packed, x).run(threads)
        assert same(peaks, outputs.amax(dim=1))
        fine = [0, 2, 4, 5, 6, 7, 8]
        assert torch.equal(token_ids[fine], outputs.argmax(dim=1)[fine])


def test_a_byte_head_with_a_bias_finds_the_highest_output(packer: ExactPacker) -> None:
    torch.manual_seed(3)
    bias = torch.randn(300) * 10
    packed, x = packer.pack(q8_0(300, K), bias), torch.randn(20, K)
    check(packed, x)


def test_byte_products_serve_all_tested_row_counts_or_none() -> None:
    """Byte products serve no row count on this machine, or all of ROWS, as other tests assume."""
    rows = rows_of("8 bits")
    assert rows == [] or max(rows) >= max(ROWS)
