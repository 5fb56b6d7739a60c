"""Triton kernels that multiply few rows: they read the weight once, at the memory's speed.

Sums are float32. In 8 bits, a row's and an output's scale are applied to the sums.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from tokenmill_worker.engines.own.cuda.overlap import start_next_kernel, wait_for_previous_kernel


@triton.jit
def one_row_kernel(
    row,  # [INPUTS]
    weight,  # [num_outputs, INPUTS]
    bias,
    row_scale,
    scales,  # [num_outputs] float32
    out,  # [num_outputs]
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # of a program
    TILE: tl.constexpr,  # inputs at a time
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply and add where the weights arrive: there is too little work for tensor cores.

    Two tiles of weights are loaded while the kernel that computes the row still runs.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, TILE)
    at = weight + output.to(tl.int64)[:, None] * INPUTS + column[None, :]
    start_next_kernel(OVERLAPS)
    first = tl.load(at).to(tl.float32)
    second = tl.load(at + TILE).to(tl.float32)
    wait_for_previous_kernel(OVERLAPS)
    sums = first * tl.load(row + column).to(tl.float32)[None, :]
    sums += second * tl.load(row + TILE + column).to(tl.float32)[None, :]
    for start in tl.range(2 * TILE, INPUTS, TILE, num_stages=NUM_STAGES):
        tile = tl.load(at + start).to(tl.float32)
        sums += tile * tl.load(row + start + column).to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if HAS_SCALES:
        result *= tl.load(scales + output) * tl.load(row_scale)
    if HAS_BIAS:
        result += tl.load(bias + output).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    rows,  # [num_rows, INPUTS]
    weight,  # [num_outputs, INPUTS]
    bias,
    row_scales,  # [num_rows] float32
    scales,  # [num_outputs] float32
    out,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # of a program
    ROWS: tl.constexpr,  # of a program
    TILE: tl.constexpr,  # inputs at a time
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply few rows on the tensor cores: weights are the left operand, rows the right one."""
    start_next_kernel(OVERLAPS)
    wait_for_previous_kernel(OVERLAPS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, TILE)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    at = weight + output.to(tl.int64)[:, None] * INPUTS + column[None, :]
    row_at = rows + row[None, :] * INPUTS + column[:, None]
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, INPUTS, TILE, num_stages=NUM_STAGES):
        tile = tl.load(at + start)
        right = tl.load(row_at + start, mask=is_row[None, :], other=0.0)
        # In 8 bits tensor cores keep 14 bits of a sum, so they add up no more than one tile.
        sums = tl.dot(tile, right, sums, input_precision="ieee", max_num_imprecise_acc=TILE)
    if HAS_SCALES:
        row_scale = tl.load(row_scales + row, mask=is_row, other=0.0)
        sums *= tl.load(scales + output)[:, None] * row_scale[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + output).to(tl.float32)[:, None]
    out_at = out + row[None, :].to(tl.int64) * num_outputs + output[:, None]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_row[None, :])
