"""How a measured engine talks with the benchmark: JSON lines over its standard streams.

The parent sends one line per round, a workload; the child answers with one line, what happened. Only
the standard library is imported here, because a peer may live in an environment of its own. What
engines print goes to standard error, so that it cannot be taken for an answer.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Protocol

from ops.benchmarks.workload_files import Workload, WorkloadRequest


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a comparison holds equal; `pool_tokens` is the size of the KV cache."""

    model: str
    dtype: str = "float32"
    threads: int = 0
    pool_tokens: int = 32_768
    max_batch_tokens: int = 512
    max_sequences: int = 64
    settings: dict[str, object] = field(default_factory=dict)  # our engine's own, by name


@dataclass(slots=True)
class Round:
    """One workload, run once. Times in seconds from the moment all requests are present."""

    wall_s: float
    tokens: list[list[int]]  # per request
    first_s: list[float]  # per request: its first token
    last_s: list[float]  # per request: its last token
    steps: int | None = None
    computed_tokens: int | None = None  # through the model
    cached_tokens: int | None = None
    batch_sizes: list[int] = field(default_factory=list)  # sequences that got a token, per step
    latency_s: list[float] = field(default_factory=list)  # per chunk: from the step's end to the subscriber
    stages: dict[str, list[float]] = field(default_factory=dict)  # per chunk: parts of that, in order
    script_calls: int | None = None  # to the queue server
    script_s: float | None = None  # its time in them
    engine_s: list[float] = field(default_factory=list)  # per request: until the engine had it
    cpu_s: dict[str, float] = field(default_factory=dict)  # CPU time of each process around the engine


class MeasuredEngine(Protocol):
    description: str

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round: ...
    def close(self) -> None: ...


def serve(load: Callable[[EngineOptions], MeasuredEngine]) -> None:
    """The child's main: load, warm up by whatever the parent sends first, answer until the stream ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, object]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    finish = ExitStack()
    try:
        started = time.perf_counter()
        engine = load(EngineOptions(**json.loads(sys.stdin.readline())))
        finish.callback(engine.close)
        answer({"ready": engine.description, "load_s": time.perf_counter() - started})
        for line in sys.stdin:
            rows = json.loads(line)
            requests = tuple(WorkloadRequest(tuple(row[0]), row[1]) for row in rows)
            answer(asdict(engine.run(requests)))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        finish.close()


def encode(workload: Workload) -> str:
    return json.dumps([[list(request.prompt), request.max_tokens] for request in workload.requests])
