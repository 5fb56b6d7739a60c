"""Compiles a test's own C++ against the kernels' headers."""

import ctypes
import dataclasses
from pathlib import Path

import pytest

from tokenmill_worker.engines.own.cpu.kernels.library import SOURCES, cache_folder, compile_library
from tokenmill_worker.engines.own.cpu.kernels.toolchain import (
    KernelUnavailableError,
    find_toolchain,
)


def compiled(name: str) -> ctypes.CDLL:
    """Compile and load this folder's `name`.cpp. Skips the test if no compiler is available."""
    try:
        toolchain = find_toolchain()
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    headers = "".join(header.read_text() for header in sorted(SOURCES.glob("*.h")))
    toolchain = dataclasses.replace(
        toolchain, flags=(*toolchain.flags, f"-I{SOURCES}"), identity=toolchain.identity + headers
    )
    source = Path(__file__).with_name(f"{name}.cpp")
    return ctypes.CDLL(str(compile_library(name, [source], cache_folder(None), toolchain)))
