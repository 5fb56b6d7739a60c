"""Compiles kernel sources once into a cache folder and loads them through ctypes.

The file's name carries a hash of sources, flags, compiler and instruction sets, so a stale build is
never loaded. It is compiled into a folder of its own and renamed into place, under a lock file: of
several processes that need it at once, one compiles and the others wait.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from tokenmill_worker.engines.own.cpu.kernels.toolchain import (
    KernelUnavailableError,
    Toolchain,
    find_toolchain,
)

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent


@lru_cache
def load(name: str, cache_dir: Path | None = None, march: str = "native") -> ctypes.CDLL:
    """Load the library made of `<name>.cpp` and every header here; compile it if it is not cached
    yet.

    Each process has one handle per library. Raises KernelUnavailableError.
    """
    toolchain = find_toolchain(march)
    target = compile_library(name, [SOURCES / f"{name}.cpp"], cache_folder(cache_dir), toolchain)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise KernelUnavailableError(
            f"the compiled kernel {target} does not load: {error}"
        ) from error


def cache_folder(chosen: Path | None) -> Path:
    """Return the chosen folder, or one under the home directory, or a temporary one if neither can
    be written.
    """
    candidates = (
        [chosen]
        if chosen
        else [Path.home() / ".cache" / "tokenmill", Path(tempfile.gettempdir()) / _owner()]
    )
    for folder in candidates:
        kernels = folder / "kernels"
        try:
            kernels.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # Another user's folder could hold any code, so only a folder of this user is accepted.
        if os.access(kernels, os.W_OK) and kernels.stat().st_uid == os.getuid():
            return kernels
    raise KernelUnavailableError(
        f"no folder of ours to keep compiled kernels in (tried {candidates})"
    )


def compile_library(name: str, sources: Sequence[Path], folder: Path, toolchain: Toolchain) -> Path:
    """Compile the library unless it exists, and return its path."""
    headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
    digest = hashlib.sha256(toolchain.identity.encode())
    for path in (*sources, *headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = folder / f"{name}-{digest.hexdigest()[:24]}.so"
    if target.exists():
        return target
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():  # no other process has compiled it meanwhile
            _compile(name, sources, target, toolchain)
    return target


def _compile(name: str, sources: Sequence[Path], target: Path, toolchain: Toolchain) -> None:
    started, folder = time.monotonic(), target.parent
    log.info("Compiling the CPU kernel %r (once; kept in %s)", name, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        for source, made in zip(sources, objects, strict=True):
            _run([toolchain.compiler, *toolchain.flags, "-c", str(source), "-o", str(made)])
        made = Path(scratch) / target.name
        # Linked without -fopenmp, which would add the compiler's own runtime to torch's.
        _run(
            [
                toolchain.compiler,
                "-shared",
                *map(str, objects),
                str(toolchain.openmp),
                "-o",
                str(made),
            ]
        )
        made.replace(target)
    log.info("Compiled the CPU kernel %r in %.1f s", name, time.monotonic() - started)


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelUnavailableError(f"{command[0]} does not run: {error}") from error
    if result.returncode != 0:
        raise KernelUnavailableError(
            f"{command[0]} failed to compile a kernel: {result.stderr.strip()[-600:]}"
        )


def _owner() -> str:
    return f"tokenmill-{os.getuid()}"
