"""A service of several processes as a measured engine: Valkey, its parts, a subscriber per job.

The subscribers share this process. A round is timed from the first submit to the last subscriber's
end. All processes are on one machine, reach Valkey by a Unix socket and read one monotonic clock.
A part that is killed is started again at once, as systemd would do, unless another part does so.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from ops.benchmarks.measure.figures import Arrivals
from ops.benchmarks.measure.protocol import MeasuredEngine, Round
from ops.benchmarks.measure.workloads import WorkloadRequest
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import ValkeyServer

TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))
START_TIMEOUT_S = 900.0  # several engines may load at once
END_LIMIT_S = 900.0  # from a kill to the end of all jobs; a server may have to load again
# Words in the command line of those parts that a worker starts.
INNER = {"engine process": "tokenmill_worker.engines.process.child", "EngineCore": "::EngineCore"}

Passage = dict[int, float]  # number of tokens so far → time


class ReceivedTokens:
    """Tokens that one subscriber received, with the time of the first and the last.

    For a noted job, `times` has the time at which each number of tokens was reached.
    """

    def __init__(self, arrivals: Arrivals, is_noted: bool = False) -> None:
        self.job = ""
        self.tokens: list[int] = []
        self.repeated = 0
        self.first_s = self.last_s = 0.0  # monotonic
        self.times: Passage | None = {} if is_noted else None
        self._arrivals = arrivals

    def take(self, index: int, tokens: Sequence[int]) -> None:
        """Take tokens; `index` is the number of those before them in the answer."""
        new = tokens[max(0, len(self.tokens) - index) :]
        self.repeated += len(tokens) - len(new)
        if not new:
            return
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.tokens += new
        self._arrivals.add(self.last_s, len(new))
        if self.times is not None:
            self.times[len(self.tokens)] = self.last_s


class MeasuredService(MeasuredEngine):
    """A service on one machine. Its kind gives the commands of its parts, and serves jobs."""

    noted_one_in = 0  # jobs

    def __init__(self) -> None:
        self._undo = ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="tokenmill-bench-")
        self.folder = Path(self._undo.enter_context(folder))
        self.socket = self.folder / "valkey.sock"
        self._valkey = ValkeyServer(
            settings={"unixsocket": str(self.socket)}, at_death=signal.SIGKILL
        ).start()
        self._undo.callback(self._valkey.stop)
        self._commands: Mapping[str, list[str]] = {}
        self._variables: Mapping[str, str] = {}
        self._processes: dict[str, GuardedProcess] = {}
        self.loop = self._undo.enter_context(asyncio.Runner())
        self._rounds = 0

    async def is_ready(self) -> bool:
        raise NotImplementedError

    async def serve(
        self, requests: Sequence[WorkloadRequest], received: Sequence[ReceivedTokens], tenant: str
    ) -> None:
        """Submit these jobs, and fill `received` until all have ended."""
        raise NotImplementedError

    def latencies(self, received: Sequence[ReceivedTokens]) -> list[float]:
        return []

    def start(self, commands: Mapping[str, list[str]], variables: Mapping[str, str]) -> None:
        """Start the commands of these parts, with this environment; wait until they serve."""
        self._commands, self._variables = commands, variables
        for part in commands:
            self._start(part)
            self._undo.callback(self._end, part, signal.SIGTERM)
        self.loop.run(self._wait_ready())

    def _start(self, part: str) -> None:
        self._processes[part] = GuardedProcess(
            self._commands[part],
            # vLLM's server ends its core only if it ends in order
            at_death=signal.SIGTERM if part == "server" else signal.SIGKILL,
            env=self._variables,
            output=sys.stderr.buffer,
        )

    def _end(self, part: str, number: int) -> None:
        """End a part, then what it has left behind in its process group."""
        process = self._processes[part]
        process.end(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.process.pid, signal.SIGKILL)

    async def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await self.is_ready():
            ended = [part for part, process in self._processes.items() if not process.is_alive]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{ended[0]} ended" if ended else "it did not get ready")
            await asyncio.sleep(0.1)

    def close(self) -> None:
        self._undo.close()

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        arrivals, noted = Arrivals(), self.noted_one_in
        are_noted = [bool(noted) and index % noted == 0 for index in range(len(requests))]
        received = [ReceivedTokens(arrivals, is_noted) for is_noted in are_noted]
        cpu_before, started = self._cpu(), time.monotonic()
        self.loop.run(self.serve(requests, received, self._tenant()))
        wall_s = time.monotonic() - started
        first_s = [each.first_s for each in received]
        return Round(
            wall_s=wall_s,
            tokens=[each.tokens for each in received],
            first_s=[first - started for first in first_s],
            steady_tok_s=arrivals.steady_rate(first_s, [each.last_s for each in received]),
            cpu_s={part: seconds - cpu_before[part] for part, seconds in self._cpu().items()},
            latency_s=self.latencies(received),
        )

    def survive(self, requests: tuple[WorkloadRequest, ...], part: str) -> dict[str, float]:
        return self.loop.run(self._survive(requests, part))

    async def _survive(self, requests: Sequence[WorkloadRequest], part: str) -> dict[str, float]:
        """Kill a part when half of the tokens are there, and wait until all jobs have ended.

        `lost` counts tokens that no subscriber got, `repeated` those that one got again; `pause_s`
        is the longest time without a new token.
        """
        await self._wait_ready()
        arrivals, wanted = Arrivals(), sum(request.max_tokens for request in requests)
        received = [ReceivedTokens(arrivals) for _ in requests]
        serving = asyncio.create_task(self.serve(requests, received, self._tenant()))
        await asyncio.to_thread(self._kill, part, lambda: arrivals.num_tokens >= wanted // 2)
        await asyncio.wait([serving], timeout=END_LIMIT_S)
        serving.cancel()
        for problem in await asyncio.gather(serving, return_exceptions=True):
            if problem is not None:
                print(f"after the death of {part}: {problem!r}", file=sys.stderr)
        return {
            "lost": wanted - arrivals.num_tokens,
            "repeated": sum(each.repeated for each in received),
            "pause_s": arrivals.longest_pause(),
        }

    def _tenant(self) -> str:
        """Return the name of a new round, which finds no prefix of an earlier one."""
        self._rounds += 1
        return f"round-{self._rounds}"

    def _kill(self, part: str, is_time: Callable[[], bool]) -> None:
        deadline = time.monotonic() + END_LIMIT_S
        while not is_time() and time.monotonic() < deadline:
            time.sleep(0.005)
        if part in self._commands:
            self._end(part, signal.SIGKILL)
            self._start(part)
            return
        worker = psutil.Process(self._processes["worker"].process.pid)
        for process in worker.children(recursive=True):
            if INNER[part] in " ".join(process.cmdline()):
                process.kill()
                return
        raise RuntimeError(f"the worker has no {part}")

    def _cpu(self) -> dict[str, float]:
        """Return each process's CPU seconds so far; the worker's exclude its engine's."""
        pids = {
            "worker": self._processes["worker"].process.pid,
            "server": self._valkey.pid,
            "subscribers": os.getpid(),
        }
        return {part: cpu_seconds(pid) for part, pid in pids.items()}


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads, ended ones included, in seconds."""
    return time.clock_gettime(~pid << 3 | 2)  # its CPU clock, as clock_getcpuclockid(3) builds it
