"""Compiles the fused kernels for GPUs that need not be here: the interpreter proves results, this
that types compile,
rows stay in registers, and loads of a row are wide.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests.engines.own.cuda.assembler import (  # noqa: E402
    ASSEMBLER,
    FEW_BYTES,
    spilled_bytes,
)
from tokenmill_worker.engines.own.cuda.attention.triton import is_interpreted  # noqa: E402
from tokenmill_worker.engines.own.cuda.draw import CHOOSE_WARPS, CHUNK, TILE, WARPS  # noqa: E402
from tokenmill_worker.engines.own.cuda.draw_cut import choose_kernel, gather_kernel  # noqa: E402
from tokenmill_worker.engines.own.cuda.draw_kernel import (  # noqa: E402
    measure_kernel,
    pick_kernel,
    race_kernel,
)
from tokenmill_worker.engines.own.cuda.fused.kernels import (  # noqa: E402
    gate_kernel,
    norm_kernel,
    quantize_kernel,
    rotate_and_write_kernel,
)
from tokenmill_worker.engines.own.cuda.fused.product_kernels import (  # noqa: E402
    few_rows_kernel,
    one_row_kernel,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(is_interpreted(), reason="the kernels are interpreted in this process"),
    pytest.mark.skipif(not ASSEMBLER.exists(), reason="this Triton brings no assembler for CUDA"),
]

HEADS = {"BLOCK_SIZE": 16, "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HEAD_PAD": 128,
         "HALF": 64,
         "HALF_PAD": 64, "REST_PAD": 1}  # fmt: skip
BF16 = dict.fromkeys(("x", "residual", "weight", "out", "sums", "packed", "cache", "cos",
                      "sin", "query_weight",
                      "key_weight", "logits", "row", "rows", "bias"), "*bf16")  # fmt: skip
KINDS = {**BF16, "slots": "*i64", "inverse_temperature": "*fp32", "log_min_p": "*fp32",
         "top_p": "*fp64",
         "top_k": "*i64", "keys": "*i32", "token_ids": "*i64", "peaks": "*fp32",
         "narrow": "*fp8e4nv", "scales": "*fp32",
         "key_scales": "*fp32", "value_scales": "*fp32",
         "row_scale": "*fp32", "row_scales": "*fp32",
         "numbers": "*fp32", "winners": "*i32", "found": "*i32", "kept": "*i32",
         "deviations": "fp32", "eps": "fp32"}  # fmt: skip
CHUNKS = {"CHUNK": CHUNK, "CHUNKS_PAD": 32}

ROTATE = {"HAS_NORM": False, "OFFSET": 0.0}
NORM = {"HAS_NORM": True, "OFFSET": 0.0}
UNSCALED = {"HAS_SCALES": False, "key_scales": None, "value_scales": None}
PRODUCT = {"INPUTS": 4096, "HAS_BIAS": True, "HAS_SCALES": False}


BUILDS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "add and norm": (norm_kernel, {"WIDTH": 4096, "PAD": 4096, "OFFSET": 0.0, "ADDS": True}, 8),
    "norm": (norm_kernel, {"WIDTH": 2560, "PAD": 4096, "OFFSET": 1.0, "ADDS": False}, 8),
    "8 bits": (
        quantize_kernel,
        {"WIDTH": 14336, "PAD": 16384, "LARGEST": 448.0, "LEAST_SCALE": 1e-12},
        16,
    ),
    "silu": (gate_kernel, {"INNER": 14336, "TILE": 1024, "IS_GELU": False}, 4),
    "gelu": (gate_kernel, {"INNER": 9728, "TILE": 1024, "IS_GELU": True}, 4),
    "rotate": (rotate_and_write_kernel, {**HEADS, **ROTATE, **UNSCALED, "TOKENS": 1}, 1),
    "norm and rotate": (rotate_and_write_kernel, {**HEADS, **NORM, **UNSCALED, "TOKENS": 8}, 4),
    "scaled": (rotate_and_write_kernel, {**HEADS, **NORM, "HAS_SCALES": True, "TOKENS": 1}, 1),
    "measure": (measure_kernel, {"CHUNK": CHUNK}, WARPS),
    "race": (race_kernel, CHUNKS, WARPS),
    "pick": (pick_kernel, CHUNKS, WARPS),
    "gather": (gather_kernel, {**CHUNKS, "TILE": TILE}, WARPS),
    "choose": (choose_kernel, {"CHUNKS_PAD": 32, "TILE": TILE}, CHOOSE_WARPS),
    "one row": (one_row_kernel, {**PRODUCT, "OUTPUTS": 16, "TILE": 256, "NUM_STAGES": 4}, 4),
    "few rows": (
        few_rows_kernel,
        {**PRODUCT, "OUTPUTS": 64, "ROWS": 16, "TILE": 128, "NUM_STAGES": 6},
        4,
    ),
    "64 rows": (
        few_rows_kernel,
        {**PRODUCT, "OUTPUTS": 64, "ROWS": 64, "TILE": 128, "NUM_STAGES": 3},
        4,
    ),
}
LONG = ("norm", "gelu", "norm and rotate", "64 rows")  # other builds of the same kernels


@pytest.mark.parametrize(
    ("kernel", "constants", "warps"),
    [
        pytest.param(*build, id=name, marks=pytest.mark.long if name in LONG else ())
        for name, build in BUILDS.items()
    ],
)
def test_fused_kernels_keep_their_rows_in_registers(
    kernel: Any, constants: dict[str, Any], warps: int, tmp_path: Path
) -> None:
    if "OVERLAPS" in kernel.arg_names:
        constants = {**constants, "OVERLAPS": True}
    signature = {
        name: "constexpr" if name in constants else KINDS.get(name, "i32")
        for name in kernel.arg_names
    }
    loose = {
        parameter.name for parameter in kernel.params if parameter.do_not_specialize_on_alignment
    }
    wide = [
        i
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") and name not in loose
    ]
    wide += [
        kernel.arg_names.index(n)
        for n in ("x_stride", "row_stride", "vocab", "block_stride")
        if n in kernel.arg_names
    ]
    source = ASTSource(
        kernel, signature, constants, {(index,): [["tt.divisibility", 16]] for index in wide}
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )
    assert spilled_bytes(compiled.asm["ptx"], "sm_90a", tmp_path) <= FEW_BYTES
    if kernel in (norm_kernel, quantize_kernel, gate_kernel, measure_kernel, gather_kernel):
        assert "ld.global.v4" in compiled.asm["ptx"], "loads are narrow"
    if kernel is choose_kernel:  # a tile is used while the next is under way
        waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.asm["ptx"])
        assert waits.count("1") >= 4, "one of the four loops over a row waits for its newest tile"
    if kernel in (one_row_kernel, few_rows_kernel):
        assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "no tile is loaded ahead"
    if kernel is few_rows_kernel:
        assert "wgmma.mma_async" in compiled.asm["ptx"]
