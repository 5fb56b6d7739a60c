"""Fixtures of the engine tests: tiny models, each saved once per run, and compiled kernels."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.own.truth import tiny_models
from tokenmill_worker.engines.own.cpu.kernels.linear import LinearKernels
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a family's tiny model.

    Tests must not write there.
    """
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tiny_models.save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.fixture(scope="session")
def llama(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("llama")


@pytest.fixture(scope="session")
def linear_kernels() -> None:
    """Skip the test if no compiler is available."""
    try:
        LinearKernels()
    except KernelUnavailableError as error:
        pytest.skip(str(error))
