"""The engines that the suite tries, each as the command line of a process and its first frame.

`--engine` and `--engine-command` name another one in their place.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engines.conformance.driver import EngineUnderTest
from tests.support.vllm import ARGUMENTS, VLLM, needs_vllm, with_vllm
from tokenmill_worker.contract.messages import Ready, Start
from tokenmill_worker.engines.own.model.model_files import resolve
from tokenmill_worker.engines.process.host import CHILD_MODULE

MODEL = "smollm2-135m-instruct"
EXAMPLE = "ops.examples.engine"
LENGTH, PLACES = 1_024, 4
SETTINGS = {"max_model_len": LENGTH, "max_num_seqs": PLACES}  # of every engine

LONG_START = pytest.mark.timeout(1_200)
KINDS: list[Any] = [
    "own",
    "synthetic",
    pytest.param("vllm", marks=[pytest.mark.slow, LONG_START, needs_vllm]),
]


@dataclass(frozen=True)
class EngineToTry:
    """An engine's process and its first frame."""

    command: list[str]  # without the number of its socket
    start: Start
    environment: dict[str, str] | None = None

    def open(self, start: Start | None = None) -> EngineUnderTest:
        """Start the process; it has still to load."""
        return EngineUnderTest(self.command, start or self.start, self.environment)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test the kinds that it is for: the example is for the first part of the suite."""
    if "kind" not in metafunc.fixturenames:
        return
    option, kinds = metafunc.config.getoption, KINDS
    if given := option("--engine") or option("--engine-command"):
        kinds = [pytest.param(given, marks=LONG_START)]
    elif metafunc.module.__name__.endswith(("test_process", "test_requests")):
        kinds = [*KINDS, EXAMPLE]
    elif "model" in metafunc.fixturenames:
        kinds = [kind for kind in KINDS if kind != "synthetic"]
    metafunc.parametrize("kind", kinds, scope="module")


@pytest.fixture(scope="module")
def engine_to_try(
    kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> EngineToTry:
    option = request.config.getoption
    if option("--engine") or option("--engine-command"):
        settings = SETTINGS | json.loads(option("--engine-settings"))
        command = shlex.split(option("--engine-command")) or [sys.executable, "-m", CHILD_MODULE]
        return EngineToTry(command, Start(engine=option("--engine"), settings=settings))
    if kind == "vllm":
        command = [str(VLLM), "-m", CHILD_MODULE]
        return EngineToTry(command, start_of_kind(kind), with_vllm(os.environ))  # noqa: TID251
    start = start_of_kind(kind)
    if kind == "own" and request.module.__name__.endswith("test_process"):
        # These tests start it again and again, and look at no token. It needs torch, which another
        # engine's environment may lack, and whose import takes seconds.
        from tests.support import tiny_llama

        start.settings["model"] = str(tiny_llama.save(tmp_path_factory.mktemp("tiny")))
    return EngineToTry([sys.executable, "-m", CHILD_MODULE], start)


def start_of_kind(kind: str) -> Start:
    kinds: dict[str, dict[str, Any]] = {
        "own": {"dtype": "float32", "num_blocks": 512, "policy": "priority"},
        "synthetic": {"model": f"synthetic?length={LENGTH}&step_ms=2", "policy": "priority"},
        "vllm": {
            "dtype": "float32",
            "engine_arg": ARGUMENTS,
        },
        EXAMPLE: {"model": "alphabet"},
    }
    settings = kinds[kind]
    model = {} if "model" in settings else {"model": str(resolve(MODEL))}
    return Start(engine=kind, settings=SETTINGS | settings | model)


@pytest.fixture(scope="session")
def kept() -> Iterator[dict[str, tuple[EngineUnderTest, Ready]]]:
    """The engines that serve the next module too: ours takes seconds to start."""
    engines: dict[str, tuple[EngineUnderTest, Ready]] = {}
    try:
        yield engines
    finally:
        for engine, _ in engines.values():
            engine.kill()


@pytest.fixture(scope="module")
def loaded(
    kind: str, engine_to_try: EngineToTry, kept: dict[str, tuple[EngineUnderTest, Ready]]
) -> Iterator[tuple[EngineUnderTest, Ready]]:
    """One engine of the kind for all tests of a module."""
    if kind in kept:
        yield kept[kind]
        return
    engine = engine_to_try.open()
    try:
        found = engine, engine.ready()
        if kind == "own":
            kept[kind] = found
        yield found
    finally:
        if kind not in kept:
            engine.kill()


@pytest.fixture
def engine(loaded: tuple[EngineUnderTest, Ready]) -> EngineUnderTest:
    return loaded[0]


@pytest.fixture
def model(engine: EngineUnderTest) -> EngineUnderTest:
    """An engine whose tokens follow from a model's distribution."""
    return engine


@pytest.fixture
def ready(loaded: tuple[EngineUnderTest, Ready]) -> Ready:
    return loaded[1]
