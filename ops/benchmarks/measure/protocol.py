"""Protocol between the benchmark and a measured engine: JSON lines over the standard streams.

The parent sends one line per round, a workload and perhaps a part to kill meanwhile; the child
answers with one line, the result. This module imports only the standard library, because a peer may
live in an environment of its own. Whatever an engine prints goes to standard error, so that it
cannot be taken for an answer.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from ops.benchmarks.measure.workloads import Workload, WorkloadRequest


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that are equal for all engines; `pool_tokens` is the size of the KV cache."""

    model: str
    dtype: str = "float32"
    pool_tokens: int = 32_768
    max_batch_tokens: int = 512
    max_sequences: int = 64
    settings: dict[str, object] = field(default_factory=dict)  # settings of our engine, by name

    def engine_settings(self) -> dict[str, Any]:
        """Return all settings of our engine, by name."""
        block_size = self.settings.get("block_size", 16)
        return {
            "model": self.model, "dtype": self.dtype, "max_num_seqs": self.max_sequences,
            "max_num_batched_tokens": self.max_batch_tokens, "block_size": block_size,
            "num_blocks": self.pool_tokens // int(str(block_size)), **self.settings,
        }  # fmt: skip


@dataclass(slots=True)
class Round:
    """Result of one workload, run once. Times are seconds since all requests were present."""

    wall_s: float
    tokens: list[list[int]]  # token ids per request
    first_s: list[float]  # time of the first token, per request
    batch_sizes: list[int] = field(default_factory=list)  # sequences that got a token, per step
    steady_tok_s: float | None = None  # tokens per second while all requests give tokens
    # per chunk, seconds from its step's end to the subscriber
    latency_s: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)  # of each process around the engine


class MeasuredEngine:
    """An engine in its process."""

    description: str
    parts: Sequence[str] = ()  # names of processes that `survive` can kill

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        raise NotImplementedError

    def survive(self, requests: tuple[WorkloadRequest, ...], part: str) -> dict[str, float]:
        """Kill a part in the middle of a round; return what its readers noticed."""
        raise NotImplementedError

    def close(self) -> None:
        """End what does not end with the process; here nothing."""


def serve(load: Callable[[EngineOptions], MeasuredEngine]) -> None:
    """Run the child process: load the engine, then answer each workload until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: Mapping[str, object]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    with ExitStack() as finish:
        try:
            started = time.perf_counter()
            engine = load(EngineOptions(**json.loads(sys.stdin.readline())))
            finish.callback(engine.close)
            load_s = time.perf_counter() - started
            answer({"ready": engine.description, "parts": engine.parts, "load_s": load_s})
            for line in sys.stdin:
                rows, part = json.loads(line)
                requests = tuple(WorkloadRequest(tuple(row[0]), row[1]) for row in rows)
                answer(engine.survive(requests, part) if part else asdict(engine.run(requests)))
        except KeyboardInterrupt:
            pass
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise


def encode(workload: Workload, part: str = "") -> str:
    rows = [[list(request.prompt), request.max_tokens] for request in workload.requests]
    return json.dumps([rows, part])
