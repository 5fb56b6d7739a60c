"""`ops/bench gpu`: how much of a CUDA device the engine uses.

The models have well-known shapes and random weights.

The ceilings (bytes per second, operations per second) are measured in the same run. The floor of a
step is the sum of what each product and attention must take by them, counted from the model's
shapes. For every model: decode by batch size, one long prefill, drawn tokens, and decode with keys
and values in 8 bits. The record is written after every measurement and names what `--limit` left no
time for, so an interrupted run keeps all that it measured.

`--part way` measures the whole service (Valkey, log, pub/sub, SQL) beside the bare engine, with as
many streams as the largest batch. It needs the packages of worker and client too.

`--device cpu --shape tiny --dtype float32` runs all of it anywhere. A machine that has torch,
transformers, rich and msgspec runs it without an installation of ours:

    python3 -m ops.benchmarks gpu --json gpu.json
"""

import argparse
import sys
from functools import partial
from typing import Any

import torch
from rich.console import Console

from ops.benchmarks.gpu.measures import EngineMeasures, configure, engine_of
from ops.benchmarks.gpu.models import describe, forget, random_model
from ops.benchmarks.gpu.session import Session
from ops.benchmarks.measure.step_floor import SHAPES
from ops.benchmarks.measure.tables import show
from tokenmill_worker.engines.own.model.loader import LoadedModel

COLUMNS = {
    "tokens_s": ("tokens/s", "{:,.0f}"),
    "ms": ("ms", "{:.2f}"),
    "share_of_floor": ("floor's share", "{:.1%}"),
    "share_of_engine": ("engine's share", "{:.1%}"),
    "of_all": ("of all", "{:.1%}"),
}
EIGHT_BITS = {"kv_dtype": "float8_e4m3fn"}  # keys and values
Wanted = tuple[str] | tuple[str, int]  # a measurement of EngineMeasures, and its batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    both, many = "repeatable; default: llama-3-8b, qwen3-4b", "repeatable; default: 1, 32, 128, 256"
    parser.add_argument("--shape", action="append", choices=SHAPES, help=both)
    parser.add_argument("--batch", action="append", type=int, help=many)
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--context", type=int, default=512, help="tokens of each decoding sequence")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument(
        "--part",
        action="append",
        choices=("model", "way"),
        help="model: the engine; way: the whole service (Valkey, log, pub/sub, SQL) beside it; "
        "repeatable; default: model",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2, help="of the whole service")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds; then nothing is begun")


def run(options: argparse.Namespace) -> dict[str, Any]:
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        console.print(
            "ops/bench gpu: torch sees no CUDA device (--device cpu --shape tiny: on a CPU)"
        )
        return {"ok": False, "error": "no CUDA device"}
    options.batch = options.batch or [1, 32, 128, 256]
    session = Session(options, console)
    parts = {"model": measure, "way": serve}
    for what in options.part or ("model",):
        for name in options.shape or ["llama-3-8b", "qwen3-4b"]:
            session.attempt(name, what, partial(parts[what], name, session))
            forget()
    _show(console, session.record)
    return session.record


def measure(name: str, session: Session) -> None:
    """Measure the engine with its default settings, then with keys and values in 8 bits."""
    options, batches = session.options, sorted(session.options.batch)
    model = random_model(SHAPES[name], options.device, session.dtype)
    loaded = describe(model, configure(SHAPES[name], options))
    decodes: list[Wanted] = [("decode", batch) for batch in dict.fromkeys(options.batch)]
    wanted = [*decodes, ("prefill",), ("drawn", batches[-1])]
    measure_case(name, session, loaded, "default", {}, wanted)
    halves = [one for one in decodes if one[-1] in (batches[len(batches) // 2], batches[-1])]
    measure_case(name, session, loaded, "8-bit keys and values", EIGHT_BITS, halves)


def serve(name: str, session: Session) -> None:
    """Measure the whole service beside the engine, on a new model."""
    # needs packages that the other parts do not
    from ops.benchmarks.gpu.whole_way import compare, saved

    options, shape = session.options, SHAPES[name]
    with saved(random_model(shape, options.device, session.dtype), shape) as folder:
        session.tell(f"{name}: written", str(folder))
        forget()  # the two processes need the memory
        logs = options.json.parent if options.json else None
        session.attempt(name, "whole way", partial(compare, folder, shape, options, logs))


def measure_case(
    name: str, session: Session, loaded: LoadedModel, case: str, settings: dict[str, Any],
    wanted: list[Wanted],
) -> None:  # fmt: skip
    """Measure an engine with these settings."""
    options, shape = session.options, SHAPES[name]

    def inside() -> dict[str, Any]:
        with engine_of(loaded, configure(shape, options, **settings)) as engine:
            measures = EngineMeasures(engine, shape, session.ceilings, options)
            for what, *batch in wanted:
                work = partial(getattr(measures, what), *batch)
                session.attempt(name, f"{case}: {' '.join(map(str, (what, *batch)))}", work)
            graphs = getattr(engine.runner, "graphs", None)
            return {
                "engine": engine.runner.info.description,
                "graphs": (graphs.num_captured, graphs.num_replays) if graphs else (0, 0),
                "refusal": getattr(graphs, "refusal", None),
            }

    session.attempt(name, case, inside)
    forget()


def _show(console: Console, record: dict[str, Any]) -> None:
    ceilings = record["ceilings"]
    for name, found in record["results"].items():
        title = (
            f"{name}: beside the floor, by {ceilings['bytes_s'] / 1e9:,.1f} GB/s and "
            f"{ceilings['operations_s'] / 1e12:,.2f} TFLOP/s, measured in this run"
        )
        show(console, title, found, COLUMNS)
    for what, reason in record["left_out"].items():
        console.print(f"left out: {what}: {reason}", markup=False)
