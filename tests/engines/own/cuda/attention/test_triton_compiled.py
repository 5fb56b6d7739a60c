"""Compiles the attention kernel for GPUs that need not be here, and reads what the assembler says
of it.

The interpreter proves results; this proves that the kernel has types that compile, fits the shared
memory and keeps its rows in registers, for the launches that the backend plans.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.engines.own.cuda.assembler import (
    ASSEMBLER,
    FEW_BYTES,
    spilled_bytes,
)
from tests.support.marks import long_unless
from tokenmill_worker.engines.own.attention.base import AttentionMetadata, AttentionShape

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tokenmill_worker.engines.own.cuda.attention.launch_plan import (  # noqa: E402
    Launch,
    fold_sizes,
    plan_launch,
)
from tokenmill_worker.engines.own.cuda.attention.triton import is_interpreted  # noqa: E402
from tokenmill_worker.engines.own.cuda.attention.triton_kernels import attend_kernel  # noqa: E402
from tokenmill_worker.engines.own.cuda.attention.write_kernel import write_kernel  # noqa: E402

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1, "fp8e5": 1}  # bytes
# what one program may take; 8.6 and 8.9 run the builds for 8.0
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}
SPILLED_BY_256_ROWS = 128  # by a thread: faster than any tile without spills, on an H200
POINTERS = {
    **dict.fromkeys(("block_table", "query_start", "seq_lens", "prefix_lens", "counters"), "*i32"),
    **dict.fromkeys(("partials", "limits", "prefix", "prefix_sums"), "*fp32"),
}
ALIGNED = (
    "query",
    "cache",
    "out",
    "partials",
    "prefix",
    "prefix_sums",
    "block_table",
    "query_start",
    "seq_lens",
    "query_stride",
    "query_head_stride",
    "block_stride",
    "value_offset",
)

LLAMA = AttentionShape(32, 8, 128, 0.1)
FALCON = AttentionShape(71, 1, 64, 0.1)
SMOLLM = AttentionShape(9, 3, 64, 0.1)
GEMMA = AttentionShape(4, 1, 256, 0.1, softcap=50.0)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(is_interpreted(), reason="the kernels are interpreted in this process"),
    pytest.mark.skipif(not ASSEMBLER.exists(), reason="this Triton brings no assembler for CUDA"),
]


def planned(
    shape: AttentionShape,
    query_len: int,
    seq_len: int,
    element: str,
    cache: str,
    capability: int,
    num_seqs: int = 1,
) -> Launch:
    empty = torch.zeros(num_seqs, dtype=torch.int32)
    metadata = AttentionMetadata(empty, empty, empty, empty, query_len, seq_len, 16, None)
    return plan_launch(
        shape, metadata, query_len * num_seqs, element_size=SIZES[cache], num_multiprocessors=132,
        has_warp_groups=capability == 90, is_exact=element == "fp32",
    )  # fmt: skip


def source_of(
    shape: AttentionShape,
    launch: Launch,
    capability: int,
    element: str,
    window: int,
    has_sinks: bool,
    cache: str,
    prefix: str = "none",  # "read": the launch computes one; "added": it adds its results
) -> ASTSource:
    group = shape.num_heads // shape.num_kv_heads
    head_pad = triton.next_power_of_2(shape.head_dim)
    fold_rows, fold_splits = fold_sizes(launch.block_tokens * group, head_pad)
    constants: dict[str, object] = {
        "NUM_HEADS": shape.num_heads,
        "GROUP": group,
        "HEAD_DIM": shape.head_dim,
        "HEAD_PAD": head_pad,
        "BLOCK_SIZE": 16,
        "WINDOW": window,
        "IS_CHUNKED": False,
        "HAS_SOFTCAP": bool(shape.softcap),
        "HAS_SINKS": has_sinks,
        "IS_PREFIX": prefix == "read",
        "BLOCK_ROWS": launch.block_rows,
        "BLOCK_TOKENS": launch.block_tokens,
        "TILE_KEYS": launch.tile_keys,
        "IS_SPLIT": launch.is_split,
        "IS_DECODE": launch.is_decode,
        "FOLD_ROWS": fold_rows,
        "FOLD_SPLITS": fold_splits,
        "OVERLAPS": capability >= 90,
    }
    if not launch.is_split:
        constants |= {"partials": None, "limits": None, "counters": None}
    if not has_sinks:
        constants["sinks"] = None
    if prefix == "none":
        constants["prefix_sums"] = None
    if prefix != "added":
        constants |= {"prefix": None, "prefix_lens": None}
    signature = {}
    for name in attend_kernel.arg_names:
        kind = "fp32" if name in ("scale", "softcap") else "i32"
        if name in ("query", "cache", "out", "sinks"):
            kind = f"*{cache if name == 'cache' else element}"
        if name == "out" and prefix == "read":
            kind = "*fp32"
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, kind)
    hints = {(attend_kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED}
    return ASTSource(attend_kernel, signature, constants, hints)


WIDE = {
    "decode": (LLAMA, 1, 100, "bf16", 0, False, "bf16"),
    "split decode": (LLAMA, 1, 30_000, "bf16", 0, False, "bf16"),
    "prompt": (LLAMA, 4096, 4096, "bf16", 0, False, "bf16"),
    "small": (SMOLLM, 40, 400, "fp16", 0, False, "fp16"),
    "soft-capped prompt": (GEMMA, 600, 600, "bf16", 512, True, "bf16"),
    "soft-capped decode": (GEMMA, 1, 600, "bf16", 512, False, "bf16"),
    "late chunk": (LLAMA, 40, 8000, "bf16", 0, False, "bf16"),
    "decode of a large group": (FALCON, 1, 8000, "bf16", 0, False, "bf16"),
    "exact, large heads": (GEMMA, 300, 8000, "fp32", 0, False, "fp32"),
    "exact": (LLAMA, 64, 64, "fp32", 0, False, "fp32"),
}
NARROW = {  # keys and values of 8 bits, which older GPUs do not have
    "decode over 8 bits": (LLAMA, 1, 100, "bf16", 0, False, "fp8e4nv"),
    "split decode over 8 bits": (LLAMA, 1, 30_000, "bf16", 0, False, "fp8e4nv"),
    "prompt over 8 bits": (LLAMA, 4096, 4096, "bf16", 0, False, "fp8e4nv"),
    "split decode over E5M2": (LLAMA, 1, 30_000, "bf16", 0, False, "fp8e5"),
    "prompt over E5M2": (LLAMA, 4096, 4096, "bf16", 0, False, "fp8e5"),
}


# a build takes seconds: all others belong to the long form
SHORT = {
    *((80, name) for name in ("decode", "soft-capped prompt", "exact")),
    *((90, name) for name in ("split decode", "prompt", "split decode over 8 bits")),
}


@pytest.mark.parametrize(
    ("capability", "shape", "query_len", "seq_len", "element", "window", "has_sinks", "cache"),
    [
        pytest.param(
            capability,
            *case,
            id=f"{name}, {capability}",
            marks=() if (capability, name) in SHORT else pytest.mark.long,
        )
        for capability, cases in ((80, WIDE), (90, WIDE | NARROW))
        for name, case in cases.items()
    ],
)
def test_the_attention_kernel_keeps_its_rows_in_registers(
    capability: int,
    shape: AttentionShape,
    query_len: int,
    seq_len: int,
    element: str,
    window: int,
    has_sinks: bool,
    cache: str,
    tmp_path: Path,
) -> None:
    launch = planned(shape, query_len, seq_len, element, cache, capability)
    source = source_of(shape, launch, capability, element, window, has_sinks, cache)
    assembly = assembly_of(source, launch, capability)
    if element != "fp32":
        assert "wgmma" in assembly or "mma.sync" in assembly, "no tensor cores"
    most = SPILLED_BY_256_ROWS if launch.block_rows == 256 else FEW_BYTES
    assert spilled_bytes(assembly, architecture_of(capability), tmp_path) <= most


@pytest.mark.parametrize(
    ("capability", "cache"),
    long_unless({(90, "fp8e4nv")}, [(80, "bf16"), (90, "bf16"), (90, "fp8e4nv")]),
)
@pytest.mark.parametrize(
    "shape",
    [LLAMA, *(pytest.param(shape, marks=pytest.mark.long) for shape in (SMOLLM, GEMMA))],
    ids=["llama", "smollm", "gemma"],
)
@pytest.mark.parametrize("seq_len", [500, 5000])
def test_many_decodes_keep_their_rows_in_registers(
    seq_len: int, shape: AttentionShape, capability: int, cache: str, tmp_path: Path
) -> None:
    launch = planned(shape, 1, seq_len, "bf16", cache, capability, num_seqs=1024)
    source = source_of(shape, launch, capability, "bf16", 0, False, cache)
    assembly = assembly_of(source, launch, capability)
    assert spilled_bytes(assembly, architecture_of(capability), tmp_path) <= FEW_BYTES


@pytest.mark.parametrize(
    ("num_seqs", "cache"), long_unless({(128, "fp8e4nv")}, [(8, "bf16"), (128, "fp8e4nv")])
)
def test_decodes_with_a_common_prefix_keep_their_rows_in_registers(
    num_seqs: int, cache: str, tmp_path: Path
) -> None:
    """Both launches: the prefix's, whose rows are those of a prompt, and the decode's."""
    for query_len, count, prefix in ((num_seqs, 1, "read"), (1, num_seqs, "added")):
        launch = planned(LLAMA, query_len, 8000, "bf16", cache, 90, count)
        source = source_of(LLAMA, launch, 90, "bf16", 0, False, cache, prefix)
        assembly = assembly_of(source, launch, 90)
        assert spilled_bytes(assembly, architecture_of(90), tmp_path) <= FEW_BYTES


def architecture_of(capability: int) -> str:
    return f"sm_{capability}{'a' if capability == 90 else ''}"


def assembly_of(source: ASTSource, launch: Launch, capability: int) -> str:
    """Compile, check shared memory and loads, and return the assembly."""
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    assert_loads_are_ahead(compiled.asm["ttgir"])
    assembly: str = compiled.asm["ptx"]
    return assembly


def assert_loads_are_ahead(program: str) -> None:
    """Check that the next tile's loads are in flight while a tile's own loads are waited for.

    Each tile has a buffer of its own.
    """
    buffers = [
        int(count)
        for count in re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+x", program)
    ]
    loops = [loop for loop in program.split("scf.for")[1:] if "dot" in loop.split("scf.yield")[0]]
    assert len(loops) in (1, 2), "full tiles, and those with masks"
    assert len(buffers) == 2 * len(loops), "keys and values"
    assert min(buffers) >= 2, buffers
    for loop in loops:
        waits = re.search(r"ttg.async_wait[^\n]*num = (\d+)", loop[: loop.index("scf.yield")])
        assert waits is not None, "nothing is loaded asynchronously"
        assert int(waits[1]) > 0, "each tile waits for its own loads"


@pytest.mark.parametrize("kind", ["fp8e4nv", "fp8e5"])
def test_the_kernel_that_writes_8_bits_compiles(kind: str) -> None:
    constants = {"BLOCK_SIZE": 16, "HEAD_DIM": 128, "HEAD_PAD": 128, "TOKENS": 4}
    pointers = {"key": "*bf16", "value": "*bf16", "cache": f"*{kind}", "slots": "*i64"}
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in write_kernel.arg_names
    }
    triton.compile(ASTSource(write_kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
