"""Runs the tests of the device's kernels in a process that interprets Triton: the variable is read at its import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.attention.test_triton_interpreted import interpreted, passed

HERE = Path(__file__).parent
DRAWING = HERE.parent / "sampling" / "test_device_draw.py"


def test_kernels_interpreted() -> None:
    pytest.importorskip("triton")
    few = "norm or gates or one_pass and not 260 or each_kind and top-p"
    assert passed(interpreted(str(HERE / "test_device_fused.py"), str(DRAWING), "-k", few)) >= 13


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_of_drawing_interpreted() -> None:
    pytest.importorskip("triton")
    assert passed(interpreted(str(DRAWING))) >= 11


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_family_interpreted() -> None:
    pytest.importorskip("triton")
    assert passed(interpreted(str(HERE / "test_device_fused.py"), "-k", "fused_model or twist")) >= 5
