"""The stages of each form of `ops/gpu-check`, and their small versions for a CPU."""

import sys
from pathlib import Path

from ops.gpu_check.stages import Stage

FORMS = ("first", "speed", "variants")
TINY = [
    *("--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--batch", "1", "--batch", "3"),
    *("--steps", "4", "--prefill", "64", "--context", "20", "--long", "70", "--limit", "60"),
    *("--attention", "reference", "--share", "0.05", "--rounds", "1"),
]  # fmt: skip


def stages_of(form: str, out: Path, *, is_dry: bool) -> list[Stage]:
    """Return the stages of a form; those of a dry run take tiny shapes and the CPU."""
    device = ["--device", "cpu" if is_dry else "cuda"]
    stages = [Stage("machine", _module("machine", *device), 20 if not is_dry else 120)]
    if form == "first":
        stages.append(Stage("kernels", _module("kernels", *device), 90))
        stages.append(Stage("tests", _tests(is_dry), 150))
    return [*stages, _bench(form, out, is_dry)]


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"ops.gpu_check.{name}", *arguments]


def _tests(is_dry: bool) -> list[str]:
    """Return the command of the tests; a dry run takes two that a CPU can run."""
    chosen = ["-k", "test_devices or fails_by_itself", "-n", "1"] if is_dry else ["-n", "8"]
    names = ("xdist", "pytest_timeout", "ops.gpu_check.reports")
    plugins = [word for name in names for word in ("-p", name)]
    return ["ops/gpu-test", *plugins, "--timeout", "90", *chosen, "--tb", "short"]


def _bench(form: str, out: Path, is_dry: bool) -> Stage:
    parts = {"first": (), "speed": ("model",), "variants": ("settings",)}[form]
    words = [word for part in parts for word in ("--part", part)]
    words += ["--no-peer"] if form != "speed" else []
    limit = 270.0 if form == "first" else 530.0
    if is_dry:
        words += TINY
    else:
        words += ["--limit", str(limit - 30)]
        words += ["--shape", "llama-3-8b"] if form != "speed" else []
    return Stage("bench", _module("bench", str(out / "bench.json"), *words), limit)
