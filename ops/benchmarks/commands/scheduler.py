"""Measures the Python cost of planning and committing a step, by running and waiting sequences.

There is no model; the step's result is made up. The cost must grow with the batch and not with the
backlog. Times are CPU time of the thread, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from rich.console import Console

from ops.benchmarks.measure.tables import show
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.config.cache import CacheConfig, LayerGroup
from tokenmill_worker.engine.plan import StepOutput
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.sequence import Sequence
from tokenmill_worker.engine.types import SchedulingPolicy

RUNNING = (8, 64, 256, 1024)
WAITING = (0, 1_000, 100_000)
STEPS = 200
PROMPT = 64
BLOCK = 16


def measure(running: int, waiting: int) -> dict[str, float]:
    """Measure plan + commit with `running` decoding sequences: median and p99, in microseconds."""
    blocks_each = (PROMPT + STEPS + 64) // BLOCK + 2
    num_blocks = 1 + running * blocks_each
    config = EngineConfig(
        model="none",
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_batched_tokens=max(4096, 2 * running),
        max_num_seqs=running,
        policy=SchedulingPolicy.FIFO,
        safety_margin=0.0,
        max_waiting=1_000_000,
    )
    cache = CacheConfig(BLOCK, (LayerGroup((0,), 1, 64),), num_blocks)
    scheduler = Scheduler(config, cache, max_model_len=100_000, eos_token_ids=frozenset({1}))
    scheduler.add([_sequence(index, STEPS + 64) for index in range(running)])
    while scheduler.snapshot().generated_tokens < running:
        _step(scheduler)
    scheduler.add([_sequence(running + index, 100) for index in range(waiting)])
    gc.collect()
    gc.disable()
    try:
        times = sorted(_step(scheduler) for _ in range(STEPS))
    finally:
        gc.enable()
    return {
        "median_us": statistics.median(times) * 1e6,
        "p99_us": times[int(len(times) * 0.99)] * 1e6,
    }


def _sequence(index: int, max_tokens: int) -> Sequence:
    length = (
        PROMPT - index % BLOCK
    )  # lengths differ, so that sequences cross block borders in different steps
    prompt = [(index * 31 + position * 7) % 1000 + 2 for position in range(length)]
    return Sequence(
        request_id=f"r{index}",
        token_ids=prompt,
        num_prompt_tokens=length,
        params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        priority=1,
        tenant=f"t{index % 7}",
    )


def _step(scheduler: Scheduler) -> float:
    started = time.thread_time()
    plan = scheduler.plan()
    planned = time.thread_time()
    tokens = tuple((5,) for item in plan.scheduled if item.samples)
    output = StepOutput(plan.step_id, tokens, (None,) * len(tokens), {})
    executed = time.thread_time()
    scheduler.commit(plan, output)
    return time.thread_time() - executed + planned - started


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Add none: the sizes are those of the results."""


def run(_options: argparse.Namespace) -> dict[str, object]:
    results = {
        f"{waiting:,} waiting": {
            f"{running:,} running": measure(running, waiting) for running in RUNNING
        }
        for waiting in WAITING
    }
    title = "plan + commit of one step, µs: median (99th percentile)"
    cases = {
        waiting: {
            running: f"{figures['median_us']:,.0f} ({figures['p99_us']:,.0f})"
            for running, figures in found.items()
        }
        for waiting, found in results.items()
    }
    columns = {running: (running, "") for running in next(iter(cases.values()))}
    show(Console(), title, cases, columns)
    return {"results": results}
