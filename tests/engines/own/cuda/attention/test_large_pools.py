"""Kernels address pools of more than 2³¹ elements: index arithmetic by strides uses 64 bits.

The pool of a device has some 10¹⁰ elements. Here it has 2³¹ and some, of 8 bits each, and only the
blocks in use take memory.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from tests.engines.own.attention.cases import (
    Case,
    Problem,
    make_problem,
    metadata_of,
    round_as_stored,
)
from tokenmill_worker.engines.own.attention.base import AttentionMetadata

triton = pytest.importorskip("triton")
from triton._C.libtriton import ir  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402

from tokenmill_worker.engines.own.cuda.attention.triton import TritonAttention, is_interpreted  # noqa: E402
from tokenmill_worker.engines.own.cuda.attention.triton_kernels import attend_kernel  # noqa: E402
from tokenmill_worker.engines.own.cuda.attention.write_kernel import write_kernel  # noqa: E402
from tokenmill_worker.engines.own.cuda.fused.kernels import rotate_and_write_kernel  # noqa: E402
from tokenmill_worker.engines.own.cuda.fused.launches import (  # noqa: E402
    CacheTarget,
    Heads,
    rotate_and_write,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not is_interpreted(), reason="neither CUDA nor interpreted"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]

TYPE = torch.float8_e4m3fn
BLOCK = (2, 16, 64)  # heads, tokens, dimensions
CASE = Case("far blocks", ((1, 20), (3, 40)))
FIRST_FAR = 2**31 // (2 * 2 * 2 * 16 * 64)  # blocks of two layers before the element 2³¹


def pools(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer of a small pool, and of one whose last blocks lie behind the element 2³¹."""
    near, far = (
        torch.empty((count, 2, 2, *BLOCK), dtype=torch.uint8, device=DEVICE).view(TYPE)[:, 1]
        for count in (problem.num_blocks, FIRST_FAR + problem.num_blocks)
    )
    return near, far


def moved(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the same step in blocks of the large pool."""
    return dataclasses.replace(
        metadata,
        block_table=metadata.block_table + FIRST_FAR,
        slot_mapping=metadata.slot_mapping + FIRST_FAR * BLOCK[1],
    )


@kernels
def test_blocks_beyond_2_31_elements_are_written_and_read_correctly() -> None:
    problem = make_problem(CASE, DEVICE)
    round_as_stored(problem, TYPE)
    backend = TritonAttention(num_multiprocessors=1)
    whole = metadata_of(problem, tuple((length, length) for _, length in CASE.lens))
    step = metadata_of(problem, CASE.lens)
    results = []
    for cache, place in zip(pools(problem), (lambda same: same, moved), strict=True):
        backend.write(problem.key, problem.value, cache, place(whole))
        results.append(backend.attend(problem.query, cache, place(step), CASE.shape))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


@kernels
def test_blocks_beyond_2_31_elements_are_written_by_the_one_pass_kernel() -> None:
    problem = make_problem(CASE, DEVICE)
    step = metadata_of(problem, CASE.lens)
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64)
    packed = torch.cat([x[:4] for x in (problem.query, problem.key, problem.value)], dim=1)
    angles = torch.linspace(0, 3, 4 * 64, device=DEVICE).view(4, 64)
    written = []
    for cache, place in zip(pools(problem), (step, moved(step)), strict=True):
        target = CacheTarget(cache, place.slot_mapping, 16, cache.stride(3), cache.stride(2))
        rotate_and_write(packed.flatten(1), heads, (angles.cos(), angles.sin()), None, target)
        slots = place.slot_mapping
        written.append(cache.view(torch.uint8)[slots // 16, :, :, slots % 16].cpu())
    assert torch.equal(*written)


HEADS = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HEAD_PAD": 128}
POINTERS = {
    **dict.fromkeys(("query", "key", "value", "packed", "out", "cos", "sin"), "*bf16"),
    **dict.fromkeys(("query_weight", "key_weight", "cache"), "*bf16"),
    **dict.fromkeys(("block_table", "query_start", "seq_lens", "prefix_lens"), "*i32"),
    "slots": "*i64", "eps": "fp32", "scale": "fp32", "softcap": "fp32",
    "key_scales": "*fp32", "value_scales": "*fp32",
    "partials": "*fp32", "limits": "*fp32", "counters": "*i32",
    "prefix": "*fp32", "prefix_sums": "*fp32",
}  # fmt: skip
CONSTANTS: dict[str, dict[str, Any]] = {
    "attend": {
        "GROUP": 4, "BLOCK_SIZE": 16, "WINDOW": 0, "IS_CHUNKED": False,
        "HAS_SOFTCAP": False, "HAS_SINKS": False, "IS_PREFIX": False,
        "BLOCK_ROWS": 16, "BLOCK_TOKENS": 4, "TILE_KEYS": 64, "IS_SPLIT": True, "IS_DECODE": False,
        "FOLD_ROWS": 16, "FOLD_SPLITS": 4, "OVERLAPS": True, "sinks": None,
    },
    "write": {"BLOCK_SIZE": 16, "TOKENS": 4},
    "rotate and write": {
        "BLOCK_SIZE": 16, "HALF": 64, "HALF_PAD": 64, "REST_PAD": 1, "HAS_NORM": False,
        "HAS_SCALES": True, "OFFSET": 0.0, "TOKENS": 8, "OVERLAPS": True,
    },
}  # fmt: skip


@pytest.mark.skipif(is_interpreted(), reason="the kernels are interpreted in this process")
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("attend", attend_kernel),
        ("write", write_kernel),
        ("rotate and write", rotate_and_write_kernel),
    ],
)
def test_no_stride_is_multiplied_in_32_bits(name: str, kernel: Any) -> None:
    """Strides that fit 32 bits are passed so; their products may not fit."""
    program = program_of(kernel, HEADS | CONSTANTS[name])
    multiplied = re.findall(r"arith\.muli (%\w+), (%\w+) : (\S+)", program)
    narrow = {operand for *pair, kind in multiplied if "i64" not in kind for operand in pair}
    splats = dict(re.findall(r"(%\w+) = tt\.splat (%\w+) ", program))
    strides = {f"%{word}" for word in kernel.arg_names if word.endswith("stride")}
    assert strides, "the kernel takes no strides"
    assert not {splats.get(operand, operand) for operand in narrow} & strides


def program_of(kernel: Any, constants: dict[str, Any]) -> str:
    """Return Triton's first form of the kernel for a device with warp groups."""
    known = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        name: "constexpr" if name in known else POINTERS.get(name, "i32")
        for name in kernel.arg_names
    }
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options, context = backend.parse_options({}), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    source = ASTSource(kernel, signature, known)
    return str(source.make_ir(target, options, functions, modules, context))
