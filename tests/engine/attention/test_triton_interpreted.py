"""Runs the Triton backend's tests in a process that interprets Triton: the variable must be set before its import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHORT_CASES = ("many heads a group", "window of 1")


def interpreted(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments]
    environment = ("env", "TRITON_INTERPRET=1", "OMP_NUM_THREADS=1")
    result = subprocess.run([*environment, *command], capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout[-3000:]
    return result.stdout


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def test_kernels_interpreted() -> None:
    pytest.importorskip("triton")
    assert passed(interpreted(str(HERE / "test_triton.py"))) >= 12
    ids = [f"{HERE / 'test_backends.py'}::test_attends_as_dense_attention_does[{name}-triton]" for name in SHORT_CASES]
    assert passed(interpreted(*ids)) == len(SHORT_CASES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_case_interpreted() -> None:
    pytest.importorskip("triton")
    assert passed(interpreted(str(HERE / "test_backends.py"), "-k", "triton and not cuda")) >= 25
