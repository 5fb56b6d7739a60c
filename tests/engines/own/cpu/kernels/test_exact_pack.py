"""Narrow forms of float32 weights: found from the values alone, and every sum as the float32 kernel
has it.

Matrix registers: test_amx.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.engines.own.cpu.instruction_sets import skip_unless_runs
from tokenmill_worker.engines.own.cpu.kernels.exact_pack import (
    ExactPacker,
    find_bytes,
    find_int4,
    fits,
)
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.linear import Epilogue, LinearKernels, pack_gated
from tokenmill_worker.engines.own.cpu.kernels.quantized import round_int4
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

ROWS = [1, 2, 4, 5, 8, 9, 33, 64, 65, 130]
MARCHES = ["native", "x86-64-v3", "x86-64"]


@pytest.fixture(scope="module", params=MARCHES)
def kernels(request: pytest.FixtureRequest) -> tuple[LinearKernels, str]:
    skip_unless_runs(request.param)
    try:
        for form in ("int4", "byte", "bf16", "f16"):
            load(f"linear_{form}", None, request.param)
        return LinearKernels(march=request.param, uses_amx=False), request.param
    except KernelUnavailableError as error:
        pytest.skip(str(error))


def q4_1(n: int, k: int) -> Tensor:
    """Rounded as llama.cpp does: codes from the least weight up to the greatest."""
    groups = (
        torch.randn(n, k // 32, 32) * torch.rand(n, k // 32, 1) + torch.randn(n, k // 32, 1) * 0.1
    )
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale + 0.5).floor().clamp(max=15)
    return (codes * scale.half().float() + low.half().float()).view(n, k)


def q4_0(n: int, k: int) -> Tensor:
    """The weight of the greatest magnitude becomes −8 steps, whatever its sign."""
    groups = torch.randn(n, k // 32, 32)
    top = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    scale = top / -8
    codes = (groups / scale + 8.5).floor().clamp(0, 15)
    return ((codes - 8) * scale.half().float()).view(n, k)


def q8_0(n: int, k: int) -> Tensor:
    groups = torch.randn(n, k // 32, 32)
    scale = groups.abs().amax(dim=-1, keepdim=True) / 127
    return ((groups / scale).round() * scale.half().float()).view(n, k)


def bfloat16(n: int, k: int) -> Tensor:
    return torch.randn(n, k).bfloat16().float()


def float16(n: int, k: int) -> Tensor:
    """Subnormal ones too."""
    return (torch.randn(n, k) * 10.0 ** torch.randint(-7, 1, (n, k))).half().float()


FORMS: dict[str, Callable[[int, int], Tensor]] = {
    "4 bits": q4_1,
    "8 bits": q8_0,
    "bfloat16": bfloat16,
    "float16": float16,
    "float32": torch.randn,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(32, 32), (200, 576), (103, 96)])
def test_products_of_narrow_weights_equal_those_of_float32_bit_for_bit(
    kernels: tuple[LinearKernels, str], form: str, n: int, k: int
) -> None:
    torch.manual_seed(n)
    plain, march = kernels
    weight, bias = FORMS[form](n, k), torch.randn(n)
    narrow = ExactPacker(plain, march=march)
    packed, wanted = narrow.pack(weight, bias), plain.pack(weight, bias)
    assert packed.form == form
    for m in ROWS:
        x, residual = torch.randn(m, k), torch.randn(m, n)
        assert torch.equal(packed(x), wanted(x)), m
        assert torch.equal(packed(x, Epilogue.ADD, residual), wanted(x, Epilogue.ADD, residual)), m
    x = torch.randn(70, 2 * k)[:, :k]  # rows with a stride of their own
    assert torch.equal(packed(x), wanted(x))


@pytest.mark.parametrize("form", FORMS)
def test_products_deeper_than_a_panel_and_gates_are_exact(
    kernels: tuple[LinearKernels, str], form: str
) -> None:
    """Use more inputs than a panel in the cache holds; gate and up rows lie side by side."""
    torch.manual_seed(1)
    plain, march = kernels
    narrow = ExactPacker(plain, march=march)
    weight = FORMS[form](70, 4192)
    packed, wanted = narrow.pack(weight), plain.pack(weight)
    for m in (1, 3, 40, 64, 131):
        x, residual = torch.randn(m, 4192), torch.randn(m, 70)
        assert torch.equal(packed(x, Epilogue.ADD, residual), wanted(x, Epilogue.ADD, residual)), m
    gate, up, x = FORMS[form](96, 64), FORMS[form](96, 64), torch.randn(37, 64)
    for rows in (x[:1], x):
        found = pack_gated(narrow, gate, up)(rows, Epilogue.SWIGLU)
        assert torch.equal(found, pack_gated(plain, gate, up)(rows, Epilogue.SWIGLU))


def test_a_single_weight_that_does_not_fit_keeps_float32(
    kernels: tuple[LinearKernels, str],
) -> None:
    """A single such weight is found also behind the rows that are checked first."""
    torch.manual_seed(2)
    plain, march = kernels
    for form, make in FORMS.items():
        weight = make(2000, 64)
        weight[1999, 3] *= 1.0 + 2**-23
        weight[1999, 2] = 1000.0  # not the value on which a group's scale rests
        assert ExactPacker(plain, march=march).pack(weight).form == "float32", form


@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_a_weight_with_an_odd_number_of_inputs_stays_float32(
    kernels: tuple[LinearKernels, str], form: str
) -> None:
    """Kernels of half precision take two steps at a time."""
    plain, march = kernels
    weight, x = FORMS[form](40, 33), torch.randn(9, 33)
    packed = ExactPacker(plain, march=march).pack(weight)
    assert packed.form == "float32"
    torch.testing.assert_close(
        packed(x).double(), x.double() @ weight.double().T, rtol=2e-5, atol=2e-5
    )


def test_q4_0_weights_of_either_sign_are_recovered_exactly() -> None:
    torch.manual_seed(3)
    weight = q4_0(200, 64)
    found = find_int4(weight)
    assert found is not None
    codes, scale, zero = found
    assert codes.max() <= 15
    assert (scale < 0).any()
    back = codes.view(200, 2, 32) * scale.float()[..., None] + zero.float()[..., None]
    assert torch.equal(back.view(200, 64), weight)


def test_weights_rounded_to_int4_are_recovered_exactly() -> None:
    torch.manual_seed(4)
    codes, scale, zero = round_int4(torch.randn(300, 128))
    weight = (codes.view(300, 4, 32) * scale.float()[..., None] + zero.float()[..., None]).view(
        300, 128
    )
    found = find_int4(weight)
    assert found is not None
    again = found[0].view(300, 4, 32) * found[1].float()[..., None] + found[2].float()[..., None]
    assert torch.equal(again.view(300, 128), weight)


def test_random_and_non_finite_weights_fit_no_narrow_form() -> None:
    torch.manual_seed(5)
    weight = torch.randn(40, 64)
    assert find_int4(weight) is None
    assert find_bytes(weight) is None
    assert not fits(weight, torch.bfloat16)
    assert not fits(weight, torch.float16)
    for odd in (float("nan"), float("inf")):
        weight = q8_0(40, 64)
        weight[20, 3] = odd
        assert find_bytes(weight) is None
        assert find_int4(weight) is None
        assert not fits(weight, torch.bfloat16)
    assert not fits(torch.full((4, 2), float("nan")), torch.bfloat16), (
        "whose bits might be another's"
    )
    assert not fits(torch.tensor([[1e6, 1.0]]), torch.float16), "too large"
    assert find_int4(q4_1(4, 64)[:, :40]) is None, "no whole groups"
    assert find_bytes(q8_0(4, 64)[:, :40]) is None


def test_groups_of_zeros_or_one_value_are_exact(kernels: tuple[LinearKernels, str]) -> None:
    """Zeros, one value, and a value too small for a half-precision scale."""
    torch.manual_seed(6)
    plain, march = kernels
    weight = q4_1(64, 64)
    weight[0], weight[1, :32], weight[2] = 0.0, 0.5, -0.0
    x = torch.randn(20, 64)
    assert find_int4(weight) is not None
    assert torch.equal(ExactPacker(plain, march=march).pack(weight)(x), plain.pack(weight)(x))
    weight[3, 5] = 1e-30
    assert find_int4(weight) is None


def test_a_weight_stays_float32_if_its_narrow_form_cannot_be_compiled(
    kernels: tuple[LinearKernels, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, march = kernels

    def unavailable(*_: object) -> None:
        raise KernelUnavailableError("no room on the disk")

    monkeypatch.setattr("tokenmill_worker.engines.own.cpu.kernels.exact_pack.load", unavailable)
    packed = ExactPacker(plain, march=march).pack(bfloat16(40, 64))
    assert packed.form == "float32"
    assert (
        "A weight is kept in float32, although its file has fewer bits: no room on the disk"
        in caplog.text
    )
