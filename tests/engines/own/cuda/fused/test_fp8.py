"""Linear layers in 8 bits on a CPU, by torch's own operators; and who may not have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engines.own.cuda.fused.test_replace import CHECKS, six_layers
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.cuda.device import CudaDevice

pytest.importorskip("triton")
from tokenmill_worker.engines.own.cuda.fused import equivalence
from tokenmill_worker.engines.own.cuda.fused.fp8 import Fp8Linear, quantize_products, rounded
from tokenmill_worker.engines.own.cuda.fused.replace import replace_modules

FP8 = EngineConfig(model="some model", quantization="fp8")


def test_a_rounded_number_is_off_by_a_sixteenth_at_most() -> None:
    """E4M3 has three bits behind the first one; numbers 2^15 below the largest have fewer."""
    torch.manual_seed(0)
    rows = torch.randn(64, 100) * torch.logspace(-6, 6, 64)[:, None]
    narrow, scales = rounded(rows)
    assert narrow.float().abs().amax(dim=1).tolist() == [448.0] * 64
    error = (narrow.float() * scales - rows).abs()
    assert bool((error <= rows.abs() / 16 + scales * 2.0**-10).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the next test multiplies on the device")
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_rounded_numbers(has_bias: bool) -> None:
    torch.manual_seed(1)
    source = nn.Linear(48, 32, bias=has_bias).requires_grad_(False)
    x = torch.randn(2, 5, 48) * torch.tensor([1e-4, 1.0, 30.0, 0.0, 1e4])[None, :, None]
    weight, weight_scales = rounded(source.weight)
    narrow, scales = rounded(x.view(-1, 48))
    wanted = (narrow.double() * scales) @ (weight.double() * weight_scales).T
    if has_bias:
        wanted += source.bias
    found = Fp8Linear(source)(x)
    assert found.shape == (2, 5, 32)
    error = (found.view(-1, 32) - wanted).norm(dim=1)
    assert bool((error <= 1e-5 * wanted.norm(dim=1)).all())
    plain = source(x)
    assert float((found - plain).norm() / plain.norm()) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 16, 40, 300])
def test_a_gpus_product_is_that_of_the_rounded_numbers(num_rows: int, has_bias: bool) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no CUDA device of capability 8.9")
    torch.manual_seed(2)
    source = nn.Linear(512, 320, bias=has_bias).requires_grad_(False).cuda().bfloat16()
    x = torch.randn(num_rows, 512, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-3, 3, num_rows, device="cuda")[:, None].bfloat16()
    (weight, weight_scales), (narrow, scales) = rounded(source.weight), rounded(x)
    wanted = (narrow.double() * scales) @ (weight.double() * weight_scales).T
    if has_bias:
        wanted += source.bias
    error = (Fp8Linear(source)(x) - wanted).norm(dim=1)
    assert bool((error <= 0.01 * wanted.norm(dim=1)).all())


def test_fp8_replaces_only_the_products_of_attention_and_mlp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in CHECKS:
        monkeypatch.setattr(equivalence, name, lambda original, candidate: True)
    model = six_layers(torch.float32)
    replace_modules(model)
    quantize_products(model, "tiny")
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.Linear)]
    assert kinds.count(Fp8Linear) == 4 * 6
    assert kinds.count(nn.Linear) == 1  # the head


def test_a_model_without_fused_layers_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="no layer of tiny can be quantised: none is fused"):
        quantize_products(six_layers(torch.float32), "tiny")


NEEDED = "'fp8' runs on a GPU of compute capability 8.9 or more, in bfloat16, not on "


def test_fp8_is_refused_on_a_cpu() -> None:
    with pytest.raises(EngineConfigError, match=NEEDED + "cpu in float32"):
        CpuDevice().replace_modules(nn.Linear(2, 2), FP8)


@pytest.mark.parametrize(
    ("dtype", "capability", "quantization"),
    [
        (torch.float16, (9, 0), "fp8"),
        (torch.bfloat16, (8, 6), "fp8"),
        (torch.bfloat16, (9, 0), "int8"),
    ],
)
def test_fp8_is_refused_for_dtypes_and_gpus_without_such_products(
    dtype: torch.dtype,
    capability: tuple[int, int],
    quantization: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    device = CudaDevice(torch.device("cuda", 0))
    with pytest.raises(EngineConfigError, match=f"quantization '{quantization}' runs on "):
        device.replace_modules(nn.Linear(2, 2).to(dtype), FP8.replace(quantization=quantization))
