"""`ops/bench step`: splits the time of a decode step into its parts.

The parts are linear layers, attention, the other kernels, and overhead.

Overhead is what runs around the kernels (Python: planning, inputs, events). Each part is timed
inside the engine's own steps, where kernels find the caches as the one before left them. Work that
is fused into a linear layer (the norm before it, the gate, the addition after it) counts there.
"""

import argparse
import statistics
import time
from typing import Any

from rich.console import Console

from ops.benchmarks.compare.comparison import settings_of
from ops.benchmarks.measure.disturbance import wait_until_quiet
from ops.benchmarks.measure.tables import show
from tokenmill_worker.engine import Engine, EngineConfig, SamplingParams
from tokenmill_worker.engine.cpu.fused import WholePass
from tokenmill_worker.engine.cpu.kernels.program import KernelTimes
from tokenmill_worker.engine.execution.build import build_runner, pick_device
from tokenmill_worker.engine.model import model_files
from tokenmill_worker.engine.model.loader import load_model

PARTS = {
    "tokenmill_linear_member": "linear layers and head",
    "tokenmill_attend_member": "attention",
    "tokenmill_write_member": "rotation, cache write",
    "tokenmill_rms_norm_member": "norms of their own",
    "tokenmill_move_rows_member": "rows moved (embedding, head)",
    "tokenmill_argmax_member": "highest logits joined",
}
AROUND, WHOLE, OUTSIDE = (
    "around the kernels",
    "whole step",
    "share outside of linear layers and attention",
)
SHARED = (PARTS["tokenmill_linear_member"], PARTS["tokenmill_attend_member"])
GOAL, GOAL_SEQUENCES = 0.10, 32  # of a step, at so many sequences
WARM_UP = 8  # steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--sequences", type=int, action="append", help="repeatable; default: 1, 8, 32, 64"
    )
    parser.add_argument(
        "--context", type=int, default=64, help="tokens of each sequence at the start"
    )
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: what torch chooses")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting (EngineConfig)"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    console = Console()
    sizes = options.sequences or [1, 8, 32, 64]
    engine, times = _engine(options, max(sizes))
    if times is None:
        console.print(
            "ops/bench step: the passes of this model are not one program: only whole steps can "
            "be timed"
        )
    found = {size: _measure(engine, times, size, options) for size in sizes}
    engine.stop(drain=False)
    _show(found, engine.runner.info.description, console)
    return {"results": {"step": found}, "engine": engine.runner.info.description}


def _engine(options: argparse.Namespace, most: int) -> tuple[Engine, KernelTimes | None]:
    blocks = most * ((options.context + options.steps + 2 * WARM_UP + most) // 16 + 2)
    fields: dict[str, Any] = {
        "model": options.model, "dtype": "float32", "num_blocks": blocks, "max_num_seqs": most,
        "num_threads": options.threads or None, "prefix_cache": False, **settings_of(options.set),
    }  # fmt: skip
    config = EngineConfig(**fields)
    loaded = load_model(model_files.resolve(options.model), config, pick_device(config.device))
    engine = Engine.around(build_runner(loaded, config))
    if not isinstance(loaded.fused_pass, WholePass):
        return engine, None
    times = KernelTimes()
    loaded.fused_pass.watch(times)
    return engine, times


def _measure(
    engine: Engine, times: KernelTimes | None, size: int, options: argparse.Namespace
) -> dict[str, float]:
    """Return medians over the steps: milliseconds of each part, and the share of overhead."""
    params = SamplingParams(
        temperature=options.temperature,
        seed=1,
        ignore_eos=True,
        max_tokens=options.steps + WARM_UP + size + 8,
    )
    prompts = [
        tuple(1 + (7919 * n + 31 * i) % 250 for i in range(options.context)) for n in range(size)
    ]
    requests = engine.add_requests(prompts, params)
    begun: set[str] = set()
    while len(begun) < size:
        begun |= {event.request_id for event in engine.step() if event.token_ids}
    for _ in range(WARM_UP):
        engine.step()
    wait_until_quiet()
    steps = [_timed(engine, times, size) for _ in range(options.steps)]
    for request in requests:
        engine.cancel(request)
    while engine.has_work:
        engine.step()
    return {figure: statistics.median(step[figure] for step in steps) for figure in steps[0]}


def _timed(engine: Engine, times: KernelTimes | None, size: int) -> dict[str, float]:
    if times is not None:
        times.seconds.clear()
    started = time.perf_counter()
    events = engine.step()
    whole = 1e3 * (time.perf_counter() - started)
    if len(events) != size:
        raise RuntimeError(f"a step of {len(events)} sequences where {size} were to be measured")
    if times is None:
        return {WHOLE: whole}
    if unknown := times.seconds.keys() - PARTS:
        raise RuntimeError(f"kernels that have no part here: {', '.join(unknown)}")
    parts = {part: 1e3 * times.seconds[member] for member, part in PARTS.items()}
    overhead = {OUTSIDE: 1 - sum(parts[part] for part in SHARED) / whole}
    return {**parts, AROUND: whole - sum(parts.values()), WHOLE: whole, **overhead}


def _show(found: dict[int, dict[str, float]], engine: str, console: Console) -> None:
    cases = {
        str(size): {part: f"{ms:.2f} {ms / figures[WHOLE]:>4.0%}" for part, ms in figures.items()}
        for size, figures in found.items()
    }
    columns = {part: (part, "") for part in (*PARTS.values(), AROUND, WHOLE)}
    title = f"{engine}\nms of a decode step by sequences, and the share of it"
    show(console, title, cases, columns, turned=True)
    said = ", ".join(
        _overhead(size, figures[OUTSIDE]) for size, figures in found.items() if OUTSIDE in figures
    )
    if said:
        console.print(f"outside of linear layers and attention: {said}", soft_wrap=True)


def _overhead(size: int, share: float) -> str:
    goal = f" ({'≤' if share <= GOAL else '>'} the goal of {GOAL:.0%})"
    return f"{share:.1%} at {size}{goal if size == GOAL_SEQUENCES else ''}"
