"""Skip a test of a compiled kernel whose instruction set this processor lacks."""

from pathlib import Path

import pytest

NEEDED = {
    "native": set[str](),
    "x86-64": {"lm"},
    "x86-64-v3": {"avx2", "fma", "f16c"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "icelake-server": {"avx512_vnni", "avx512_vbmi2", "gfni"},
    "alderlake": {"avx_vnni", "gfni"},
}


def skip_unless_runs(march: str) -> None:
    """Skip the test where code that is compiled for `march` ends with an illegal instruction."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    if missing := NEEDED[march] - set(flags):
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
