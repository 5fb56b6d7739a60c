"""Runs the tests of the Triton kernels in processes that interpret Triton: the variable must be set
before its import.

A process takes some seconds to import everything: what is fast is together in one, and the rest in
two more. The interpreter is slow: of the rest, a run with fewer than 50 `--rounds` takes a fifth.
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
FAST = (
    ATTENTION,
    SPLITS,
    LARGE,
    PREFIXES,
    *(f"{CASE}[{name}-triton]" for name in ("many heads a group", "window of 1", "chunks")),
    *(
        f"{BACKENDS}::test_every_number_is_rounded_to_the_nearest_of_8_bits[{kind}-triton]"
        for kind in ("E4M3", "E5M2")
    ),
    *(
        f"{FUSED}::{name}"
        for name in (
            "test_norm_after_an_addition_equals_transformers",
            "test_fused_gates_equal_silu_and_gelu",
            "test_rows_are_quantized_to_8_bits_with_their_scales",
            "test_one_pass_over_few_tokens_equals_the_separate_operations",
            "test_one_pass_divides_by_scales_before_rounding",
        )
    ),
    f"{DRAWING}::test_each_kind_of_parameters_draws_torch_s_tokens[top-p]",
    f"{DRAWING}::test_raw_and_processed_log_probabilities_equal_torch_s",
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
        [*environment, *command], capture_output=True, text=True, check=False, timeout=600, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout[-3000:]
    found = re.search(r"(\d+) passed", result.stdout)
    return int(found[1]) if found else 0


def without_fast(rounds: int) -> list[str]:
    every = 1 if rounds >= 50 else 5
    return [
        *(word for name in FAST[4:] for word in ("--deselect", name)),
        *("--every", str(every)),
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_selected_cases_of_every_kernel_pass_interpreted() -> None:
    pytest.importorskip("triton")
    assert interpreted(*FAST) >= 50


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cases_of_attention_pass_interpreted(rounds: int) -> None:
    pytest.importorskip("triton")
    least = 23 if rounds >= 50 else 5
    assert interpreted(BACKENDS, "-k", "triton and not cuda", *without_fast(rounds)) >= least


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_draws_and_families_pass_interpreted(rounds: int) -> None:
    pytest.importorskip("triton")
    least = 20 if rounds >= 50 else 4
    assert interpreted(DRAWING, FUSED, *without_fast(rounds)) >= least
