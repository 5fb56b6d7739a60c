"""Fused modules of a CUDA device against Transformers' own modules.

Kernels run where there is CUDA, or where this process interprets Triton: test_interpreted starts
one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engines.own.support import ChunkingPlanner, execute, make_sequence
from tests.engines.own.truth import tiny_models
from tokenmill_worker.engines.own.attention.base import KVScales, stored_as
from tokenmill_worker.engines.own.config import AttentionName, EngineConfig
from tokenmill_worker.engines.own.execution.build import build_runner, pick_device
from tokenmill_worker.engines.own.model.equivalence import rotate
from tokenmill_worker.engines.own.model.loader import LoadedModel, load_model

pytest.importorskip("triton")
from tokenmill_worker.engines.own.cuda.attention.triton import is_interpreted
from tokenmill_worker.engines.own.cuda.fused.fp8 import quantize_products, rounded
from tokenmill_worker.engines.own.cuda.fused.launches import (
    CacheTarget,
    HeadNorms,
    Heads,
    add_and_norm,
    gate,
    quantize,
    rotate_and_write,
)
from tokenmill_worker.engines.own.cuda.fused.products import DeviceLinear, can_multiply, multiply
from tokenmill_worker.engines.own.cuda.fused.replace import replace_modules

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not is_interpreted(), reason="neither CUDA nor interpreted"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    # the interpreter's numpy: then infinity
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]
ALL = {"DeviceNorm", "DeviceMLP", "DeviceAttention", "DeviceLayer"}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rms(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)


# ── the kernels ──


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 80), (3, 1)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_after_an_addition_equals_transformers(rows: int, width: int, offset: float) -> None:
    x, residual, weight = (
        random(rows, 2 * width)[:, :width],
        random(rows, width, seed=1),
        random(width, seed=2),
    )
    out, sums = add_and_norm(x, residual, weight, 1e-5, offset)
    torch.testing.assert_close(sums, x + residual)
    torch.testing.assert_close(out, rms(x + residual, weight, 1e-5, offset))
    alone, same = add_and_norm(x, None, weight, 1e-5, offset)
    assert same is x
    torch.testing.assert_close(alone, rms(x, weight, 1e-5, offset))


@pytest.mark.parametrize("inner", [1, 96, 1030])
def test_fused_gates_equal_silu_and_gelu(inner: int) -> None:
    packed = 3 * random(3, 2 * inner)
    left, right = packed.chunk(2, dim=1)
    torch.testing.assert_close(gate(packed, is_gelu=False), torch.nn.functional.silu(left) * right)
    wanted = torch.nn.functional.gelu(left, approximate="tanh") * right
    torch.testing.assert_close(gate(packed, is_gelu=True), wanted)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 70])
def test_products_of_few_rows_equal_torch_s(rows: int, has_bias: bool) -> None:
    x, weight = random(rows, 768)[:, :512], random(128, 512, seed=1)
    bias = random(128, seed=2) if has_bias else None
    wanted = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(multiply(x, weight, bias, x.dtype), wanted, atol=1e-4, rtol=1e-4)
    scales = random(rows, 1, seed=3), random(1, 128, seed=4)
    scaled = scales[0] * (wanted if bias is None else wanted - bias) * scales[1]
    torch.testing.assert_close(
        multiply(x, weight, bias, x.dtype, scales),
        scaled if bias is None else scaled + bias,
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 32, 33])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(9216, 512), (64, 14_336), (65, 512), (64, 600), (64, 256)]
)
def test_a_linear_layer_of_16_bits_equals_torch_s(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype
) -> None:
    """Few rows and sizes that fit use our kernels; others those of torch."""
    x = random(rows, inputs).to(dtype)
    weight = (random(outputs, inputs, seed=1) / inputs**0.5).to(dtype)
    layer = DeviceLinear(weight, random(outputs, seed=2).to(dtype))
    assert can_multiply(x, weight) == (rows <= 32 and outputs != 65 and inputs in (512, 14_336))
    wanted = torch.nn.functional.linear(x.double(), weight.double(), layer.bias.double())
    torch.testing.assert_close(layer(x).double(), wanted, atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "has_norm", "is_token_major"),
    [(16, 16, True, False), (16, 16, False, True), (20, 12, True, True)],
)
def test_one_pass_over_few_tokens_equals_the_separate_operations(
    head_dim: int, rotary_dim: int, has_norm: bool, is_token_major: bool
) -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=head_dim, rotary_dim=rotary_dim)
    check_one_pass(heads, has_norm, is_token_major, 5)


def test_one_pass_over_several_tokens_a_program_rotates_queries_and_writes_the_cache() -> None:
    """One pass handles 36 tokens, so that a program takes several."""
    check_one_pass(Heads(num_heads=2, num_kv_heads=2, head_dim=20, rotary_dim=12), True, False, 36)


def test_one_pass_rounds_keys_and_values_to_8_bits() -> None:
    """A rotated key may come from the other side of a tie; a value is what it was."""
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=16)
    check_one_pass(heads, True, False, 5, torch.float8_e4m3fn)


def test_one_pass_divides_by_scales_before_rounding() -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=20, rotary_dim=12)
    scales = KVScales(*(torch.tensor(pair, device=DEVICE) for pair in ([0.25, 4.0], [2.0, 0.125])))
    check_one_pass(heads, True, False, 5, torch.float8_e5m2, scales)


def check_one_pass(
    heads: Heads,
    has_norm: bool,
    is_token_major: bool,
    num_tokens: int,
    kv_dtype: torch.dtype = torch.float32,
    scales: KVScales | None = None,
) -> None:
    head_dim, rotary_dim, num_kv = heads.head_dim, heads.rotary_dim, heads.num_kv_heads
    num_packed = heads.num_heads + 2 * num_kv
    packed, angles = (
        random(num_tokens, num_packed * head_dim),
        random(num_tokens, rotary_dim, seed=1),
    )
    norms = (
        HeadNorms(random(head_dim, seed=2), random(head_dim, seed=3), 1e-6, 1.0)
        if has_norm
        else None
    )
    shape = (4, num_kv, head_dim) if is_token_major else (num_kv, 4, head_dim)
    pool = torch.full((num_tokens // 4 + 3, 3, 2, *shape), torch.nan, dtype=kv_dtype, device=DEVICE)
    cache = pool[:, 1]
    order = torch.randperm(4 * (num_tokens // 4 + 2), generator=torch.Generator().manual_seed(4))
    slots = (4 + order[:num_tokens]).to(DEVICE)
    strides = (
        (cache.stride(2), cache.stride(3)) if is_token_major else (cache.stride(3), cache.stride(2))
    )
    target = CacheTarget(cache, slots, 4, *strides, scales)
    out = rotate_and_write(packed, heads, (angles.cos(), angles.sin()), norms, target)
    parts = packed.view(num_tokens, num_packed, head_dim).split(
        [heads.num_heads, num_kv, num_kv], dim=1
    )
    query, key, value = parts
    if norms is not None:
        query, key = (
            rms(query, norms.query_weight, 1e-6, 1.0),
            rms(key, norms.key_weight, 1e-6, 1.0),
        )
    query, key = (rotate(x, angles.cos(), angles.sin()) for x in (query, key))
    if scales is not None:
        query, (key, value) = scales.of_query(query), scales.divided(key, value)
    torch.testing.assert_close(out, query)
    # [blocks, 2, tokens, heads, head_dim]
    held = (cache if is_token_major else cache.transpose(2, 3)).float()
    blocks, offsets = slots // 4, slots % 4
    tie = torch.finfo(kv_dtype).eps if kv_dtype.itemsize == 1 else 1e-5
    torch.testing.assert_close(
        held[blocks, 0, offsets], stored_as(key, kv_dtype).float(), rtol=tie, atol=tie / 64
    )
    torch.testing.assert_close(held[blocks, 1, offsets], stored_as(value, kv_dtype).float())
    # nothing else was written
    assert int(torch.isfinite(pool.float()).sum()) == 2 * num_tokens * num_kv * head_dim


def test_rows_are_quantized_to_8_bits_with_their_scales() -> None:
    rows = random(4, 70) * torch.tensor([0.0, 1e-3, 1.0, 1e4], device=DEVICE)[:, None]
    wide = torch.cat([rows, rows], dim=1)[:, :70]
    found, scales = quantize(wide)
    wanted, wanted_scales = rounded(rows)
    torch.testing.assert_close(scales, wanted_scales)
    unequal = (found.view(torch.uint8) != wanted.view(torch.uint8)).float().mean()
    assert float(unequal) <= (0.01 if DEVICE == "cuda" else 0.0)  # a device's division is coarser


# ── in models ──


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3", ALL),
        ("phi3", ALL),
        ("gemma2", ALL - {"DeviceLayer"}),  # norms behind attention and MLP
        ("gpt_oss", {"DeviceNorm"}),  # sinks, experts
    ],
)
def test_a_fused_model_gives_the_same_tokens(family: str, kinds: set[str], tmp_path: Path) -> None:
    folder = tiny_models.save(family, tmp_path, num_layers=2)
    expected = answers(load(folder), "reference")
    fused = load(folder)
    assert set(replace_modules(fused.model)) == kinds
    names: tuple[AttentionName, ...] = ("triton", "reference")
    for attention in names:  # in one pass; and by parts
        assert answers(fused, attention) == expected


def test_a_fused_model_with_scaled_8_bit_keys_gives_the_same_answers(tmp_path: Path) -> None:
    """Scales that are powers of two change no bit in float32."""
    folder = tiny_models.save("qwen3", tmp_path, num_layers=1)
    fused = load(folder)
    expected = answers(fused, "reference")
    replace_modules(fused.model)
    heads = fused.shapes[0].num_kv_heads
    key, value = (2.0 ** torch.arange(start, start + heads, device=DEVICE) for start in (-3, 2))
    scaled = dataclasses.replace(fused, kv_scales={0: KVScales(key, value)})
    assert answers(scaled, "triton") == answers(scaled, "reference") == expected


def test_a_layer_with_another_forward_is_not_replaced(tmp_path: Path) -> None:
    """A layer whose addition is not the plain one: its parts are fused, the layer is not."""
    loaded = load(tiny_models.save("llama", tmp_path, num_layers=2))
    model: Any = loaded.model
    layer = model.model.layers[1]
    kind: Any = type(layer)
    layer.__class__ = type(
        "Twisted", (kind,), {"forward": lambda self, x, **more: 2.0 * kind.forward(self, x, **more)}
    )
    expected = answers(loaded, "reference")
    assert replace_modules(loaded.model)["DeviceLayer"] == 1
    assert answers(loaded, "triton") == expected


def test_adapters_act_on_joint_products(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    support = pytest.importorskip("tests.engines.own.lora.support")
    folder = tiny_models.save("llama", tmp_path / "model", num_layers=1)
    adapter = support.save_adapter(folder, tmp_path / "adapter", 1)
    expected = answers(load(folder), "reference", adapter)
    assert expected != answers(load(folder), "reference")
    fused = load(folder)
    assert set(replace_modules(fused.model)) == ALL
    assert answers(fused, "triton", adapter) == expected


@pytest.mark.skipif(DEVICE == "cuda", reason="torch multiplies there into bfloat16 alone")
def test_a_model_in_8_bits_rounds_weights_and_inputs_of_its_layers(tmp_path: Path) -> None:
    folder = tiny_models.save("qwen3", tmp_path, num_layers=1)
    plain, narrow = load(folder), load(folder)
    for name, module in plain.model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = widened(module.weight)
            module.register_forward_pre_hook(lambda _module, given: (widened(given[0][0])[None],))
    replace_modules(narrow.model)
    quantize_products(narrow.model, "tiny")
    assert answers(narrow, "triton") == answers(plain, "reference")


def widened(rows: Tensor) -> Tensor:
    narrow, scales = rounded(rows)
    return narrow.float() * scales


def load(folder: Path) -> LoadedModel:
    return load_model(
        folder,
        EngineConfig(model=str(folder), dtype="float32", device=DEVICE, fuse=False),
        pick_device(DEVICE),
    )


def answers(
    loaded: LoadedModel, attention: AttentionName, adapter: Path | None = None
) -> list[list[int]]:
    """Return greedy answers computed in chunks: prompt, decode and mixed steps.

    With an adapter, the first of them is the adapter's.
    """
    config = EngineConfig(
        model="none", dtype="float32", device=DEVICE, attention=attention, block_size=4,
        num_blocks=40,
        max_model_len=64, cuda_graphs=False, fuse=False,
        adapters="" if adapter is None else f"added={adapter}",
    )  # fmt: skip
    runner = build_runner(loaded, config)
    planner = ChunkingPlanner(runner.info.cache_config, 6)
    sequences = [
        make_sequence(f"s{i}", range(5 + i, 5 + i + length), 2) for i, length in enumerate((9, 3))
    ]
    if adapter is not None:
        sequences[0].adapter = runner.prepare_adapter("added").result()
    for sequence in sequences:
        planner.add(sequence)
    while not (plan := planner.plan()).is_empty:
        planner.commit(plan, execute(runner, plan))
    return [sequence.output_ids for sequence in sequences]
