"""Compiling and loading kernels: once, by several processes at a time, on torch's own OpenMP
runtime.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import logging
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.marks import long_unless
from tokenmill_worker.engines.own.cpu.kernels.library import (
    SOURCES,
    cache_folder,
    compile_library,
)
from tokenmill_worker.engines.own.cpu.kernels.toolchain import (
    KernelUnavailableError,
    Toolchain,
    find_toolchain,
    loaded_openmp,
    tuning,
)

SOURCE = """
#include "answer.h"
extern "C" int answer(int threads) {
    int total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
    for (int i = 0; i < ANSWER; ++i) total += 1;
    return total;
}
"""


@pytest.fixture
def toolchain() -> Toolchain:
    try:
        return find_toolchain()
    except KernelUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "answer.h").write_text("#define ANSWER 42\n")
    path = tmp_path / "source" / "answer.cpp"
    path.write_text(SOURCE)
    return path


def answer_of(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer(2))


def names_in(folder: Path) -> set[str]:
    """Return the names of what the folder has beside lock files."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_a_library_is_compiled_again_only_if_something_changed(
    tmp_path: Path, source: Path, toolchain: Toolchain
) -> None:
    first = compile_library("answer", [source], tmp_path, toolchain)
    assert answer_of(first) == 42
    stamp = first.stat().st_mtime_ns
    assert compile_library("answer", [source], tmp_path, toolchain) == first
    assert first.stat().st_mtime_ns == stamp
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    second = compile_library("answer", [source], tmp_path, toolchain)
    assert answer_of(second) == 43
    other_machine = dataclasses.replace(toolchain, identity="another CPU")
    assert compile_library("answer", [source], tmp_path, other_machine) not in (first, second)


def test_several_builders_compile_a_library_once(
    tmp_path: Path,
    source: Path,
    toolchain: Toolchain,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda _: compile_library("answer", [source], tmp_path, toolchain), range(4))
        )
    assert len(set(made)) == 1
    assert answer_of(made[0]) == 42
    assert names_in(tmp_path) == {made[0].name, "source"}
    said = [record.getMessage().split(" in ")[0] for record in caplog.records]
    assert said.count("Compiled the CPU kernel 'answer'") == 1


def test_a_source_that_does_not_compile_is_one_error(
    tmp_path: Path, source: Path, toolchain: Toolchain
) -> None:
    source.write_text("this is no C++")
    with pytest.raises(KernelUnavailableError, match="failed to compile"):
        compile_library("answer", [source], tmp_path, toolchain)
    assert names_in(tmp_path) == {"source"}


def test_a_missing_compiler_is_named_in_the_error() -> None:
    with pytest.raises(
        KernelUnavailableError, match=r"no C\+\+ compiler found \(looked for no-such-compiler\)"
    ):
        find_toolchain(compilers=("no-such-compiler",))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("echo '  -march=  znver3'; echo '  -mtune=  znver3'", ("-mtune=skylake-avx512",)),
        ("echo '  -march=  znver3'; echo '  -mtune=  znver4'", ()),
        ("echo 'unknown argument -Q' >&2; exit 1", ()),
    ],
)
def test_a_compiler_that_detects_an_older_cpu_gets_explicit_flags(
    tmp_path: Path, answer: str, expected: tuple[str, ...]
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n{answer}\n")
    compiler.chmod(0o755)
    assert tuning(str(compiler), "native", "fpu avx2 avx512f") == expected
    assert tuning(str(compiler), "native", "fpu avx2") == ()
    assert tuning(str(compiler), "x86-64-v4", "fpu avx2 avx512f") == ()


@pytest.mark.slow
def test_kernels_load_no_second_openmp_runtime(
    tmp_path: Path, source: Path, toolchain: Toolchain
) -> None:
    """A new process checks it, since earlier tests decide what this process has loaded."""
    path = compile_library("answer", [source], tmp_path, toolchain)
    script = (
        "import torch, ctypes, sys; torch.randn(500, 500) @ torch.randn(500, 500)\n"
        f"assert ctypes.CDLL({str(path)!r}).answer(2) == 42\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps')}\n"
        "print('\\n'.join(name for name in maps if 'omp' in name.rsplit('/', 1)[-1] and '.so' in "
        "name))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    runtimes = [line for line in result.stdout.split() if Path(line) != path]
    assert runtimes == [str(loaded_openmp())]


@pytest.mark.slow
def test_kernels_use_torch_s_openmp_beside_another_package_s() -> None:
    """sentencepiece maps a runtime of its own, before or after torch."""
    # it is not to be mapped into this process
    if importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("sentencepiece is not installed")
    expected = str(loaded_openmp())
    for order in ("torch, sentencepiece", "sentencepiece, torch"):
        module = "tokenmill_worker.engines.own.cpu.kernels.toolchain"
        script = f"import {order}; from {module} import loaded_openmp as f; print(f())"
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
        )
        assert result.stdout.strip() == expected


def test_an_unusable_cache_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelUnavailableError, match="no folder"):
        cache_folder(tmp_path / "file")
    assert cache_folder(tmp_path) == tmp_path / "kernels"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in SOURCES.glob("*.cpp")))
@pytest.mark.parametrize(
    "march",
    long_unless({"sapphirerapids", "x86-64"}, ["sapphirerapids", "icelake-server", "x86-64"]),
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
def test_every_kernel_compiles_for_other_instruction_sets(march: str, name: str) -> None:
    """Matrix registers and byte products are code that this machine may never compile itself."""
    try:
        toolchain = find_toolchain(march)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [
            toolchain.compiler,
            *toolchain.flags,
            "-O0",
            "-fsyntax-only",
            str(SOURCES / f"{name}.cpp"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[:3000]
