"""The kernels stage: every kernel of a decoder at its shapes against torch, each in a CUDA graph.

It ends with an error if a kernel's numbers are not torch's. Then come the matrix products.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from ops.benchmarks.gpu.ceilings import measure_ceilings
from ops.benchmarks.measure.step_floor import SHAPES, Ceilings, Shape
from ops.gpu_check.products import products
from ops.gpu_check.timing import seconds_a_call
from tokenmill_worker.engines.own.attention.base import (
    AttentionMetadata,
    AttentionShape,
    CommonPrefix,
)
from tokenmill_worker.engines.own.cuda import draw
from tokenmill_worker.engines.own.cuda.attention.triton import TritonAttention
from tokenmill_worker.engines.own.cuda.draw import DeviceDraw
from tokenmill_worker.engines.own.cuda.fused.launches import (
    CacheTarget,
    HeadNorms,
    Heads,
    add_and_norm,
    gate,
    rotate_and_write,
)
from tokenmill_worker.engines.own.model.equivalence import rotate
from tokenmill_worker.engines.own.sampling.draws import SamplingArrays
from tokenmill_worker.engines.own.sampling.noise import row_keys
from tokenmill_worker.engines.own.sampling.truncation import TruncationLimits, draw_sorted

BLOCK = 16
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """A kernel, and torch's operators that compute the same numbers.

    Args:
        moved: bytes that the kernel must read and write.
        operations: additions and multiplications that the kernel must do.
        tolerance: the largest difference allowed, relative to 1 + the number; for token ids, the
            share that may differ.
        is_timed: whether torch's operators are timed too.
    """

    name: str
    ours: Callable[[], Tensor]
    torchs: Callable[[], Tensor]
    moved: float
    operations: float = 0.0
    tolerance: float = 0.03
    is_timed: bool = True


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """The device and the type of a check's tensors."""

    device: torch.device
    dtype: torch.dtype

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=self.dtype)


def attention(
    tensors: TensorOptions,
    shape: Shape,
    batch: int,
    context: int,
    queries: int,
    common: int = 0,
    *,
    is_once: bool = False,
) -> KernelCheck:
    """Return the check of attention over shuffled blocks; `queries` are each sequence's last.

    The first `common` tokens are the same blocks in all sequences; with `is_once` they are read
    once for all.
    """
    heads, kv_heads, width = _heads(shape)
    backend, each = TritonAttention(), -(-context // BLOCK)
    wanted = AttentionShape(heads, kv_heads, width, width**-0.5)
    table = (torch.randperm(batch * each, device=tensors.device) + 1).view(batch, each)
    table[:, : common // BLOCK] = table[0, : common // BLOCK].clone()
    positions = torch.arange(context, device=tensors.device)
    slots = table[:, positions // BLOCK] * BLOCK + positions % BLOCK
    counts = torch.arange(batch + 1, device=tensors.device, dtype=torch.int32)

    def metadata(length: int) -> AttentionMetadata:
        return AttentionMetadata(
            query_start=counts * length,
            seq_lens=torch.full((batch,), context, device=tensors.device, dtype=torch.int32),
            block_table=table.int(),
            slot_mapping=slots[:, -length:].flatten(),
            max_query_len=length,
            max_seq_len=context,
            block_size=BLOCK,
            window=None,
            query_lens_host=(length,) * batch,
            seq_lens_host=(context,) * batch,
        )

    key, value = (tensors.random(batch, context, kv_heads, width) for _ in range(2))
    for stored in (key, value):
        stored[:, :common] = stored[:1, :common].clone()
    query = tensors.random(batch, queries, heads, width)
    cache = torch.zeros(
        (batch * each + 1, 2, *backend.block_shape(BLOCK, kv_heads, width)),
        device=tensors.device,
        dtype=tensors.dtype,
    )
    backend.write(key.flatten(0, 1), value.flatten(0, 1), cache, metadata(context))
    step, rows = metadata(queries), query.flatten(0, 1)
    if is_once:
        bounds = torch.tensor([0, batch, common + batch], dtype=torch.int32, device=tensors.device)
        prefix = CommonPrefix(torch.full_like(step.seq_lens, common), bounds, step.block_table[0])
        step = replace(step, prefix=prefix)

    def dense() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    pairs = context * (context + 1) / 2 if queries > 1 else context
    shared = f", {common} in common{', read once' * is_once}" if common else ""
    return KernelCheck(
        f"attention, {batch} × {queries} of {context}{shared}",
        lambda: backend.attend(rows, cache, step, wanted),
        dense,
        tensors.dtype.itemsize
        * (2 * key.numel() - 2 * key[1:, :common].numel() + 2 * query.numel()),
        4 * batch * heads * width * pairs,
    )


def common_prefixes(tensors: TensorOptions, name: str) -> Iterator[Callable[[], KernelCheck]]:
    """Yield functions that make the checks of decodes over a common prefix, read by each and once.

    The limits of `engines/own/attention/common_prefix.py` follow from these times.
    """
    sizes = ((2, 40, 32),) if name == "tiny" else ((128, 4608, 4096), (32, 1536, 1024))
    for batch, context, common in sizes:
        for is_once in (False, True):
            yield partial(
                attention, tensors, SHAPES[name], batch, context, 1, common, is_once=is_once
            )


def _heads(shape: Shape) -> tuple[int, int, int]:
    return shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).to(
        x.dtype
    )


def rotary(tensors: TensorOptions, shape: Shape, rows: int) -> KernelCheck:
    """Return the check of rotated queries; keys and values are written in the same launch."""
    num_heads, kv_heads, width = _heads(shape)
    packed = tensors.random(rows, (num_heads + 2 * kv_heads) * width)
    angles = torch.randn(rows, width // 2, device=tensors.device).repeat(1, 2)
    tables = angles.cos().to(tensors.dtype), angles.sin().to(tensors.dtype)
    weights = tensors.random(width), tensors.random(width)
    norms = HeadNorms(*weights, EPS, 0.0) if shape.model_type == "qwen3" else None
    cache = tensors.random(rows // BLOCK + 2, 2, kv_heads, BLOCK, width)
    slots = BLOCK + torch.randperm(rows, device=tensors.device)
    target = CacheTarget(cache, slots, BLOCK, cache.stride(3), cache.stride(2))
    heads = Heads(num_heads, kv_heads, width, width)

    def dense() -> Tensor:
        query = packed[:, : num_heads * width].view(rows, num_heads, width)
        return rotate(query if norms is None else _rms(query, weights[0]), *tables)

    return KernelCheck(
        f"rotary and write, {rows} rows",
        lambda: rotate_and_write(packed, heads, tables, norms, target),
        dense,
        2 * packed.numel() * tensors.dtype.itemsize,
    )


def norm(tensors: TensorOptions, shape: Shape, rows: int) -> KernelCheck:
    x, residual = (tensors.random(rows, shape.hidden_size) for _ in range(2))
    weight = tensors.random(shape.hidden_size)
    return KernelCheck(
        f"add and norm, {rows} rows",
        lambda: add_and_norm(x, residual, weight, EPS, 0.0)[0],
        lambda: _rms(x + residual, weight),
        4 * x.numel() * tensors.dtype.itemsize,
    )


def gated(tensors: TensorOptions, shape: Shape, rows: int) -> KernelCheck:
    packed = tensors.random(rows, 2 * shape.intermediate_size)
    left, right = packed.chunk(2, dim=1)
    return KernelCheck(
        f"gate, {rows} rows",
        lambda: gate(packed, is_gelu=False),
        lambda: silu(left) * right,
        1.5 * packed.numel() * tensors.dtype.itemsize,
    )


def drawn(tensors: TensorOptions, shape: Shape, rows: int, *, is_greedy: bool) -> KernelCheck:
    """Return the check of sampled tokens: the highest logit, or top-k 100 with top-p 0.95."""
    logits = 3 * tensors.random(rows, shape.vocab_size)
    inverse, share = (0.0, 1.0) if is_greedy else (1.25, 0.95)
    count = shape.vocab_size if is_greedy else 100
    arrays = SamplingArrays(
        np.full(rows, inverse, np.float32),
        np.full(rows, -np.inf, np.float32),
        np.full(rows, share),
        np.full(rows, count, np.int64),
    )
    seeds = np.arange(rows, dtype=np.uint64)
    keys, kernel = row_keys(seeds, np.zeros(rows, np.int64)), DeviceDraw(tensors.device)

    def sorted_draw() -> Tensor:
        wide = logits.float()
        if is_greedy:
            return wide.argmax(dim=1)
        top_k, top_p, log_min_p = (
            torch.from_numpy(column)[:, None].to(tensors.device)
            for column in (arrays.top_k, arrays.top_p, arrays.log_min_p)
        )
        limits = TruncationLimits(top_k, top_p, log_min_p, max_top_k=0, bounded=False)
        scaled = (wide - wide.amax(dim=1, keepdim=True)) * inverse
        vocabulary = torch.arange(shape.vocab_size, dtype=torch.int32, device=tensors.device)
        return draw_sorted(scaled, limits, torch.from_numpy(keys).to(tensors.device), vocabulary)

    return KernelCheck(
        f"draw {'greedy' if is_greedy else 'top-k, top-p'}, {rows} rows",
        lambda: kernel.draw(logits, arrays, keys)[0],
        sorted_draw,
        logits.numel() * tensors.dtype.itemsize,
        tolerance=0.0 if is_greedy else 0.02,  # sums in another order may move the last candidate
        is_timed=is_greedy,
    )


def checks(tensors: TensorOptions, name: str) -> Iterator[Callable[[], KernelCheck]]:
    """Yield functions that make the checks.

    Qwen3-4B's attention has the shape of Llama-3-8B's, so it is checked once.
    """
    shape, is_small = SHAPES[name], name == "tiny"
    if name != "qwen3-4b":
        decodes = ((2, 40),) if is_small else ((1, 16_000), (8, 1024), (32, 512), (256, 512))
        for batch, context in decodes:
            yield partial(attention, tensors, shape, batch, context, 1)
        for long in (48,) if is_small else (2048, 8192):
            yield partial(attention, tensors, shape, 1, long, long)
        yield from common_prefixes(tensors, name)
    for rows in (2,) if is_small else (1, 256):
        for make in (rotary, norm, gated):
            yield partial(make, tensors, shape, rows)
        for is_greedy in (True, False):
            yield partial(drawn, tensors, shape, rows, is_greedy=is_greedy)


def run(check: KernelCheck, tensors: TensorOptions, ceilings: Ceilings) -> tuple[bool, str]:
    """Return whether the numbers are torch's, and a line with the times."""
    started = time.perf_counter()
    found = check.ours()
    seconds = time.perf_counter() - started
    wanted = check.torchs()
    if found.is_floating_point():
        error = float(((found - wanted).abs() / (1 + wanted.abs())).float().max())
    else:
        error = float((found != wanted).float().mean())
    is_right = error <= check.tolerance  # False if the error is NaN
    del found, wanted
    if tensors.device.type == "cuda":
        seconds = seconds_a_call([check.ours], tensors.device)  # else Triton is interpreted: once
    rates = f"{100 * check.moved / seconds / ceilings.copied_bytes_s:.0f} % of copy"
    if check.operations:
        rates += f", {check.operations / seconds / 1e12:.1f} TFLOP/s"
    if check.is_timed:
        rates += f", torch {1e6 * seconds_a_call([check.torchs], tensors.device):.1f} µs"
    word = "" if is_right else "WRONG, "
    return is_right, f"{check.name}: {word}{1e6 * seconds:.1f} µs, {rates}, off {error:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prefixes", action="store_true", help="only decodes over a common prefix")
    options = parser.parse_args()
    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    if not is_gpu:  # Triton's interpreter sorts larger tiles for half a minute
        draw.CHUNK, draw.TILE = 256, 512
    tensors = TensorOptions(device, torch.bfloat16 if is_gpu else torch.float32)
    torch.manual_seed(0)
    ceilings = measure_ceilings(device, tensors.dtype)
    rates = ceilings.copied_bytes_s / 1e9, ceilings.operations_s / 1e12
    print(f"| copy {rates[0]:,.0f} GB/s, product {rates[1]:,.1f} TFLOP/s")
    names, wrong = (("llama-3-8b", "qwen3-4b") if is_gpu else ("tiny",)), 0
    if options.prefixes:
        names = names[:1]
    for name in names:
        for make in common_prefixes(tensors, name) if options.prefixes else checks(tensors, name):
            try:
                is_right, line = run(make(), tensors, ceilings)
            except Exception as error:  # the next kernel may work
                traceback.print_exc()
                is_right, line = False, f"{type(error).__name__}: {error}"
            wrong += not is_right
            is_brief = is_right and (name == "qwen3-4b" or ", 1 rows" in line)
            print(f"{'' if is_brief else '| '}{name}: {line}")
        for line in (
            () if options.prefixes else products(SHAPES[name], ceilings, device, tensors.dtype)
        ):
            print(f"{'| ' if name != 'qwen3-4b' else ''}{name}: {line}")
    return int(wrong > 0)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
