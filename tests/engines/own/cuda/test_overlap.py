"""Kernels that start before the one before them has ended wait for it first."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from tokenmill_worker.engines.own.cuda.attention.triton_kernels import attend_kernel
from tokenmill_worker.engines.own.cuda.fused import kernels, product_kernels
from tokenmill_worker.engines.own.cuda.overlap import overlap_of

OVERLAPPING = [
    attend_kernel,
    kernels.gate_kernel,
    kernels.norm_kernel,
    kernels.quantize_kernel,
    kernels.rotate_and_write_kernel,
    product_kernels.few_rows_kernel,
    product_kernels.one_row_kernel,
]


@pytest.mark.parametrize("kernel", OVERLAPPING, ids=lambda kernel: kernel.fn.__name__)
def test_every_overlapping_kernel_waits_before_it_returns_or_stores(kernel: Any) -> None:
    """A program that returned without waiting would let the next kernel read unfinished rows."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    assert isinstance(function, ast.FunctionDef)
    lines = [ast.unparse(statement) for statement in function.body]
    start = lines.index("start_next_kernel(OVERLAPS)")
    wait = lines.index("wait_for_previous_kernel(OVERLAPS)")
    assert start < wait
    assert not [line for line in lines[:wait] if "return" in line or "tl.store" in line]


def test_kernels_do_not_overlap_on_a_cpu() -> None:
    assert overlap_of(torch.device("cpu")) == {"OVERLAPS": False}
