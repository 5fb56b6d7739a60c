"""The kinds of engines, each as the command line of a process and its first frame.

vLLM has an environment of its own: its tests run where the variable VLLM_PYTHON names its Python,
or where `ops/bench` has built one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conformance.driver import EngineUnderTest
from tokenmill_worker.contract.messages import Ready, Start
from tokenmill_worker.engines.own.model.model_files import resolve
from tokenmill_worker.engines.process.host import CHILD_MODULE

ROOT = Path(__file__).parents[3]
VLLM = Path(os.environ.get("VLLM_PYTHON", ROOT / ".cache/peers/vllm/bin/python"))  # noqa: TID251
MODEL = "smollm2-135m-instruct"
LENGTH, PLACES = 1_024, 4

needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason=f"there is no {VLLM}")
KINDS = [
    "own",
    "synthetic",
    pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(1_200), needs_vllm]),
]


def start_of_kind(kind: str) -> Start:
    common: dict[str, Any] = {"max_model_len": LENGTH, "max_num_seqs": PLACES}
    if kind == "synthetic":
        return Start(
            engine=kind,
            settings={
                "model": f"synthetic?length={LENGTH}&step_ms=2",
                "policy": "priority",
                **common,
            },
        )
    settings = {"model": str(resolve(MODEL)), "dtype": "float32", **common}
    if kind == "vllm":
        return Start(
            engine=kind,
            settings={**settings, "engine_arg": "enforce-eager=true gpu-memory-utilization=0.15"},
        )
    return Start(engine=kind, settings={**settings, "num_blocks": 512, "policy": "priority"})


def opened(kind: str, start: Start | bytes | None = None) -> EngineUnderTest:
    """Start the process of a kind; it has still to load."""
    python, environment = sys.executable, None
    if kind == "vllm":
        python = str(VLLM)
        folders = [ROOT / "worker", ROOT / "schemas", *_plugin()]
        environment = {**os.environ, "PYTHONPATH": ":".join(map(str, folders))}  # noqa: TID251
    return EngineUnderTest([python, "-m", CHILD_MODULE], start or start_of_kind(kind), environment)


def _plugin() -> list[Path]:
    """Return a folder that names the plugin to vLLM, as an installed tokenmill does."""
    folder = ROOT / ".cache" / "vllm-plugin"
    info = folder / "tokenmill_plugin-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenmill-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntokenmill = tokenmill_worker.engines.vllm.plugin:install\n"
    )
    return [folder]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def loaded(kind: str) -> Iterator[tuple[EngineUnderTest, Ready]]:
    """One engine of the kind for all tests of a module."""
    engine = opened(kind)
    try:
        yield engine, engine.ready()
    finally:
        engine.kill()


@pytest.fixture
def engine(loaded: tuple[EngineUnderTest, Ready]) -> EngineUnderTest:
    return loaded[0]


@pytest.fixture
def model(engine: EngineUnderTest, kind: str) -> EngineUnderTest:
    """An engine whose tokens follow from a model's distribution."""
    if kind == "synthetic":
        pytest.skip("the synthetic engine's tokens follow from no distribution")
    return engine


@pytest.fixture
def ready(loaded: tuple[EngineUnderTest, Ready]) -> Ready:
    return loaded[1]
