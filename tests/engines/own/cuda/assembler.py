"""CUDA's assembler, which Triton's wheel brings: what it reports of a compiled kernel."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
# What a thread may spill: eight registers, as a version of Triton or of the assembler may. A tile
# that is too large for the registers spills hundreds of bytes.
FEW_BYTES = 32


def spilled_bytes(assembly: str, architecture: str, folder: Path) -> int:
    """Return the bytes of a thread's registers that the assembler stores to memory."""
    (folder / "kernel.ptx").write_text(assembly)
    command = [str(ASSEMBLER), "-v", f"-arch={architecture}", str(folder / "kernel.ptx"),
               "-o", str(folder / "kernel.cubin")]  # fmt: skip
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    spilled = re.search(r"(\d+) bytes spill stores", report)
    assert spilled is not None, report
    return int(spilled[1])
