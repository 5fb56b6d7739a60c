"""The stages of each form of `ops/gpu-check`, and their small versions for a CPU."""

import sys
from dataclasses import replace
from pathlib import Path

from ops.gpu_check.stages import CheckStage

DRY_S = 300.0  # of a stage on a CPU, which others may use too
FORMS = ("first", "speed", "variants", "way")
# One family of each kind of layer: windows, chunks, sinks, latents, experts, recurrent states.
FAMILIES = (
    *("llama", "gemma3_text", "llama4_text", "gpt_oss", "deepseek_v3", "qwen3_moe"),
    *("qwen3_next", "jamba", "lfm2", "falcon_h1", "nemotron_h", "granitemoehybrid"),
)
TEST_PROCESSES = 12  # fewer than the machine has cores: kernels are compiled in threads too
TINY = [
    *("--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--batch", "3"),
    *("--steps", "2", "--prefill", "64", "--context", "20"),
    *("--rounds", "1"),
]  # fmt: skip


def stages_of(form: str, out: Path, *, is_dry: bool) -> list[CheckStage]:
    """Return the stages of a form; those of a dry run take tiny shapes and the CPU."""
    device = ["--device", "cpu" if is_dry else "cuda"]
    stages = [CheckStage("machine", _module("machine", *device), 20)]
    if form == "first":
        stages.append(CheckStage("kernels", _module("kernels", *device), 110))
        stages.append(CheckStage("tests", _tests(is_dry), 100))
        stages.append(CheckStage("families", _families(device, is_dry), 60))
    if form == "variants":
        stages.append(CheckStage("prefixes", _module("kernels", *device, "--prefixes"), 50))
    stages.append(_bench(form, out, is_dry))
    return [replace(stage, limit_s=DRY_S) for stage in stages] if is_dry else stages


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"ops.gpu_check.{name}", *arguments]


def _tests(is_dry: bool) -> list[str]:
    """Return the command of the device's tests, or of a few that a CPU can run."""
    names = ("xdist", "pytest_timeout", "ops.gpu_check.reports")
    plugins = [word for name in names for word in ("-p", name)]
    processes = 1 if is_dry else TEST_PROCESSES
    shared = ["-n", str(processes), "--dist", "worksteal", "--timeout", "90"]
    shown = ["-vv", "--tb", "short", "--durations", "15"]  # each test as it ends
    few = ["-m", "", "-k", "test_devices or fails_by_itself"]
    return ["ops/gpu-test", *plugins, *shared, *shown, *(few if is_dry else [])]


def _families(device: list[str], is_dry: bool) -> list[str]:
    words = [sys.executable, "-m", "ops.model_families", *device, "--time-limit", "40"]
    return [*words, "--jobs", "1" if is_dry else "10", *FAMILIES[: 1 if is_dry else None]]


def _bench(form: str, out: Path, is_dry: bool) -> CheckStage:
    words = ["--part", "way" if form == "way" else "model"]
    limit = {"first": 250.0, "variants": 490.0, "way": 190.0}.get(form, 530.0)
    if is_dry:
        words += TINY
    else:
        words += ["--limit", str(limit - 25)]
        words += ["--shape", "llama-3-8b"] if form != "speed" else []
    return CheckStage("bench", _module("bench", str(out / "bench.json"), *words), limit)
