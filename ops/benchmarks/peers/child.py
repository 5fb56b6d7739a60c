"""Runs measured engines as child processes, which end when the benchmark ends.

They start together and take turns. While one works the others sleep, so they cost only memory.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ops.benchmarks.measure.protocol import EngineOptions, Round, encode
from ops.benchmarks.measure.workloads import Workload
from tokenmill_worker.local.child_process import guarded_command

ROOT = Path(__file__).resolve().parents[3]
# Each vLLM gets these, also one behind a worker or a server. OpenMP's threads wait passively, so
# that they leave the cores to the engine whose turn it is.
VLLM_VARIABLES = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
}


class ChildError(RuntimeError):
    """The engine's process ended or reported an error; one sentence, and the path of its log."""


def vllm_python() -> str:
    """Return the Python of vLLM's environment, as the variable VLLM_PYTHON names it."""
    if not (python := os.environ.get("VLLM_PYTHON")):
        raise ChildError("VLLM_PYTHON names no Python that has vLLM (ops/guides/vllm.md)")
    return python


class Child:
    """Process of one engine, `MODULE:CLASS`, by a Python that has the packages it needs.

    The constructor returns at once; `wait_ready` waits until the model is loaded.
    """

    def __init__(
        self,
        name: str,
        engine: str,
        options: EngineOptions,
        log: Path,
        python: str = sys.executable,
    ) -> None:
        self.name = name
        self.description, self.load_s = "", 0.0
        self.parts: Sequence[str] = ()
        self._log = log
        folders = [str(ROOT / name) for name in ("", "worker", "schemas", "api_client")]
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**os.environ, "PYTHONPATH": path}
        if "python" in options.settings:
            # in GiB; a token of SmolLM2-135M takes 45 KiB in float32
            space = str(max(1, options.pool_tokens // 16_384))
            variables |= {**VLLM_VARIABLES, "VLLM_CPU_KVCACHE_SPACE": space}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                guarded_command([python, "-m", "ops.benchmarks.peers", engine]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=variables,
                text=True,
            )
        assert self._process.stdin is not None, "opened as a pipe"
        assert self._process.stdout is not None, "opened as a pipe"
        self._input, self._output = self._process.stdin, self._process.stdout
        self._send(json.dumps(asdict(options)))

    @property
    def pid(self) -> int:
        """Process id at the root of the engine's process tree."""
        return self._process.pid

    def wait_ready(self) -> None:
        answer = self._receive()
        self.description, self.load_s = answer["ready"], answer["load_s"]
        self.parts = answer["parts"]

    def run(self, workload: Workload) -> Round:
        self._send(encode(workload))
        return Round(**self._receive())

    def kill(self, part: str, workload: Workload) -> dict[str, float]:
        """Run the workload and kill a part of the service in the middle of it."""
        self._send(encode(workload, part))
        return self._receive()

    def close(self) -> None:
        """Close the child's pipes, at which it ends; kill it if it still runs after 15 s."""
        for stream in (self._input, self._output):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        self._process.kill()
        self._process.wait()

    def _send(self, line: str) -> None:
        try:
            print(line, file=self._input, flush=True)
        except BrokenPipeError:
            raise self._died() from None

    def _receive(self) -> dict[str, Any]:
        line = self._output.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']} (its output: {self._log})")
        return answer

    def _died(self) -> ChildError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = lines[-1] if lines else "no output"
        return ChildError(f"{self.name} ended: {said} (its output: {self._log})")
