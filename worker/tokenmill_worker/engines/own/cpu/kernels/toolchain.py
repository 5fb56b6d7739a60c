"""Finds what compiling a kernel takes: a compiler, the machine's flags, and the OpenMP runtime that
torch uses.

The code that packs weights shares torch's OpenMP runtime, since two such thread pools compete for
the same cores. So the file that torch has loaded is linked, not the compiler's own. Kernels that
run in a step have their own threads (`program.cpp`).
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-w",
)
_BEFORE_AVX512 = ("znver1", "znver2", "znver3")


class KernelUnavailableError(RuntimeError):
    """A kernel cannot be compiled or loaded here; the message is one sentence on why."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Compiler, flags and OpenMP runtime of one machine.

    `identity` changes whenever a compiled file might not run or might come out differently.
    """

    compiler: str
    flags: tuple[str, ...]
    openmp: Path
    identity: str


def find_toolchain(march: str = "native", compilers: tuple[str, ...] = COMPILERS) -> Toolchain:
    if not sys.platform.startswith("linux"):
        raise KernelUnavailableError(
            f"the C++ kernels are built on Linux only, not on {sys.platform}"
        )
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise KernelUnavailableError(f"no C++ compiler found (looked for {', '.join(compilers)})")
    version = _output([compiler, "--version"])
    openmp = loaded_openmp()
    if "clang" in version and "gomp" in openmp.name:
        raise KernelUnavailableError(
            "clang cannot share torch's OpenMP runtime (libgomp); install g++"
        )
    option = (
        "-mcpu" if platform.machine() in ("aarch64", "arm64") and march == "native" else "-march"
    )
    cpu_flags = _cpu_flags()
    flags = (*FLAGS, f"{option}={march}", *tuning(compiler, march, cpu_flags))
    return Toolchain(compiler, flags, openmp, "\n".join((version, *flags, str(openmp), cpu_flags)))


def loaded_openmp() -> Path:
    """Return the OpenMP runtime that torch runs on; other packages (e.g. sentencepiece) bring
    copies of their own.
    """
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        # This symbol comes from torch's own dependencies, whatever other libraries the process has
        # loaded.
        address = ctypes.cast(library.omp_get_max_threads, ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        raise KernelUnavailableError(
            f"torch has no OpenMP runtime that a kernel could share: {error}"
        ) from error
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last and path.startswith("/"):
            return Path(path)
    raise KernelUnavailableError("torch's OpenMP runtime is no file of its own")


@lru_cache  # called for every library
def tuning(compiler: str, march: str, cpu_flags: str) -> tuple[str, ...]:
    """Return a tuning flag where the compiler is older than the CPU, or no flags.

    GCC 12, for example, takes Zen 4 for an earlier core without AVX-512 and schedules for registers
    of half the width. The tuning of another maker's CPU with AVX-512 is closer.
    """
    if march != "native" or "avx512f" not in cpu_flags.split():
        return ()
    try:
        target = _output([compiler, "-march=native", "-Q", "--help=target"])
    except KernelUnavailableError:  # not GCC
        return ()
    tuned_for = next(
        (line.split()[-1] for line in target.splitlines() if line.strip().startswith("-mtune=")), ""
    )
    return ("-mtune=skylake-avx512",) if tuned_for in _BEFORE_AVX512 else ()


def _cpu_flags() -> str:
    """Return the instruction sets of this machine; different machines may share a cache folder."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelUnavailableError(f"{command[0]} does not run: {error}") from error
