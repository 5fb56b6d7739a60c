"""Runs the tests of the Triton kernels in processes that interpret Triton: the variable must be set
before its import.

The interpreter is slow: a run with fewer than 50 `--rounds` takes each test with one of its cases,
and some cases that take another way through a kernel, in one process. The long form runs all.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
ATTENTION = "tests/engines/own/cuda/attention/test_triton.py"
PREFIXES = "tests/engines/own/cuda/attention/test_common_prefix.py"
SPLITS = "tests/engines/own/cuda/attention/test_split_kernels.py"
BACKENDS = "tests/engines/own/attention/test_backends.py"
DRAWING = "tests/engines/own/cuda/test_draw.py"
LARGE = "tests/engines/own/cuda/attention/test_large_pools.py"
FUSED = "tests/engines/own/cuda/fused/test_modules.py"
CASE = f"{BACKENDS}::test_each_backend_equals_dense_attention"
CHOSEN = (
    *(f"{CASE}[{name}-triton]" for name in ("many heads a group", "window of 1", "chunks")),
    f"{BACKENDS}::test_every_number_is_rounded_to_the_nearest_of_8_bits[E5M2-triton]",
    f"{DRAWING}::test_each_kind_of_parameters_draws_torch_s_tokens[top-p]",
    *(
        f"{FUSED}::{name}"
        for name in (
            "test_norm_after_an_addition_equals_transformers",
            "test_fused_gates_equal_silu_and_gelu",
            "test_products_of_few_rows_equal_torch_s",
            "test_one_pass_over_few_tokens_equals_the_separate_operations",
        )
    ),
    f"{DRAWING}::test_the_floor_is_exact_at_any_rank_among_the_logits[two peaks-search7-False]",
)


def interpreted(*arguments: str) -> int:
    """Run tests under Triton's interpreter. Returns how many passed; none may fail."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.support.interpreter",
        *arguments,
    ]
    environment = ("env", "TRITON_INTERPRET=1", "OMP_NUM_THREADS=1")
    result = subprocess.run(
        [*environment, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    found = re.search(r"(\d+) passed", result.stdout)
    return int(found[1]) if found else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_case_of_every_kernel_passes_interpreted() -> None:
    pytest.importorskip("triton")
    files = (ATTENTION, SPLITS, LARGE, PREFIXES, DRAWING, FUSED, BACKENDS)
    assert interpreted("--once", "-k", "not reference and not cpu", *files, *CHOSEN) >= 45


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("files", "least"),
    [((ATTENTION, SPLITS, LARGE, PREFIXES), 35), ((BACKENDS,), 25), ((DRAWING, FUSED), 25)],
    ids=["attention", "backends", "draws and families"],
)
def test_every_case_passes_interpreted(files: tuple[str, ...], least: int) -> None:
    pytest.importorskip("triton")
    assert interpreted("-k", "not reference and not cpu", *files) >= least
