"""`ops/bench gpu`: how much of a CUDA device the engine uses.

The models have well-known shapes and random weights.

The ceilings (bytes per second, operations per second) are measured in the same run; what a step
must move and compute is counted from the model's shapes. The most important measurements come
first: for every model, decode by batch size, one long prefill, drawn tokens, where a step's time
goes, and the mixed load beside Transformers' continuous batching on a second model with the same
weights. Then follow, for every model, 8-bit keys and values, uneven lengths, scattered blocks, the
attention backends, and the model without graphs, running ahead, fused modules or the drawing
kernel. The record is written after every measurement and names what `--limit` left no time for, so
an interrupted run keeps all that it measured.

`--device cpu --shape tiny --dtype float32` runs all of it anywhere. A machine that has torch,
transformers, rich and msgspec runs it without an installation of ours:

    python3 -m ops.benchmarks gpu --json gpu.json
"""

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from ops.benchmarks.gpu import report
from ops.benchmarks.gpu.ceilings import Ceilings, measure_ceilings
from ops.benchmarks.gpu.measures import (
    DRAWN,
    GREEDY,
    configure,
    decode,
    engine_of,
    gaps,
    prefill,
    scatter,
)
from ops.benchmarks.gpu.models import SHAPES, describe, forget, fused_modules, random_model
from ops.benchmarks.gpu.peer import beside
from tokenmill_worker.engine import Engine, EngineConfigError, SamplingParams
from tokenmill_worker.engine.model.loader import LoadedModel

PAGED_BLOCK = 256  # block size that FlashAttention 2 requires
BESIDE_S = 150.0  # seconds that both engines need for the mixed load, warm-up included


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", action="append", choices=SHAPES, help="repeatable; default: llama-3-8b, qwen3-4b"
    )
    parser.add_argument(
        "--batch", action="append", type=int, help="of decode; repeatable; default: 1, 32, 128, 256"
    )
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--context", type=int, default=512, help="tokens of each decoding sequence")
    parser.add_argument(
        "--long", type=int, default=16_000, help="tokens of the one long sequence among short ones"
    )
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument(
        "--attention", action="append", help="a backend to compare; repeatable; default: all"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--share", type=float, default=4.0, help="scale the mixed load's 64 requests"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of the mixed load")
    parser.add_argument("--no-peer", action="store_true", help="leave Transformers out")
    parser.add_argument(
        "--limit",
        type=float,
        default=540.0,
        help="seconds after which nothing more is begun or waited for",
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    console = report.console()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        console.print(
            "ops/bench gpu: torch sees no CUDA device (--device cpu --shape tiny runs the same "
            "code)"
        )
        return {"ok": False, "error": "no CUDA device"}
    options.batch = options.batch or [1, 32, 128, 256]
    session = Session(options, console)
    for what, work in (("model", measure), ("settings", vary)):
        for name in options.shape or ["llama-3-8b", "qwen3-4b"]:
            session.attempt(name, what, lambda work=work, name=name: work(name, session))  # type: ignore[misc]
            forget()
    report.show(console, session.record)
    return session.record


class Session:
    """Keeps the growing record of a run and its deadline."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self._console = console
        self.until = time.monotonic() + options.limit
        self._keep: Callable[[dict[str, Any]], None] = getattr(
            options, "keep", lambda _record: None
        )
        self.ceilings: Ceilings = measure_ceilings(
            torch.device(options.device), getattr(torch, options.dtype)
        )
        self.record: dict[str, Any] = {
            "ok": True,
            "device": report.describe(options.device),
            "ceilings": asdict(self.ceilings),
            "results": {},
            "left_out": {},
        }
        self._keep(self.record)
        report.tell(console, "ceilings", self.record["ceilings"])

    def keep(self, shape: str, what: str, found: Any) -> None:
        self.record["results"].setdefault(shape, {})[what] = found
        self._keep(self.record)

    def attempt(self, shape: str, what: str, work: Callable[[], Any], needs_s: float = 0.0) -> Any:
        """Run one measurement, and keep and return its result.

        Returns None if too little time is left or the measurement failed; the record says which.
        """
        left_out = self.record["left_out"]
        if time.monotonic() + needs_s > self.until:
            left_out[f"{shape}: {what}"] = "no time was left"
            return None
        started = time.perf_counter()
        try:
            found = work()
        except (
            EngineConfigError
        ) as error:  # not possible on this machine, for example a missing backend
            left_out[f"{shape}: {what}"] = str(error)
            report.tell(self._console, f"{shape}: {what} is left out", str(error))
            return None
        except Exception as error:
            self.record["ok"] = False
            left_out[f"{shape}: {what}"] = f"{type(error).__name__}: {error}"
            self._console.print(traceback.format_exc(), markup=False, highlight=False)
            return None
        finally:
            self._keep(self.record)
        if found is not None:
            self.keep(shape, what, found)
            report.tell(
                self._console, f"{shape}: {what} ({time.perf_counter() - started:.1f} s)", found
            )
        return found


def measure(name: str, session: Session) -> None:
    """Measure the engine with its default settings, then beside its peer."""
    options, shape = session.options, SHAPES[name]
    loaded = describe(
        random_model(shape, options.device, getattr(torch, options.dtype)),
        configure(shape, options),
    )
    whole(name, "default", session, loaded)
    if not options.no_peer:
        session.attempt(
            name,
            "mixed",
            lambda: beside(
                shape,
                options,
                loaded,
                session.until,
                lambda found: session.keep(name, "mixed", found),
            ),
            BESIDE_S,
        )


def vary(name: str, session: Session) -> None:
    """Measure the same model with one thing changed at a time."""
    options = session.options
    shape, dtype, largest = SHAPES[name], getattr(torch, options.dtype), max(options.batch)
    base = configure(shape, options)
    loaded = describe(random_model(shape, options.device, dtype), base)
    middle = [sorted(options.batch)[len(options.batch) // 2]]
    part(
        name,
        "8-bit keys and values",
        session,
        loaded,
        [*middle, largest],
        {"kv_dtype": "float8_e4m3fn"},
    )
    part(name, "uneven lengths", session, loaded, middle, {}, long=options.long)
    part(name, "scattered blocks", session, loaded, [largest], {}, is_scattered=True)
    for backend in options.attention or ("triton", "flash", "torch_varlen", "reference"):
        block = PAGED_BLOCK if backend in ("flash", "torch_varlen") else 16
        part(
            name,
            f"attention {backend}",
            session,
            loaded,
            middle,
            {"attention": backend, "block_size": block},
        )
    settings: tuple[tuple[str, dict[str, Any]], ...] = (
        ("without graphs", {"cuda_graphs": False}),
        ("without running ahead", {"async_batching": False}),
        ("without either", {"cuda_graphs": False, "async_batching": False}),
    )
    for what, changes in settings:
        part(name, what, session, loaded, middle, changes)
    part(name, "without the drawing kernel", session, loaded, middle, {"fuse": False}, params=DRAWN)
    del loaded
    forget()
    plain = describe(random_model(shape, options.device, dtype), base.replace(fuse=False))
    part(name, "without fused modules", session, plain, [min(options.batch), *middle], {})


def whole(name: str, what: str, session: Session, loaded: LoadedModel) -> None:
    """Take all measurements of an engine with its default settings."""
    options, shape, ceilings = session.options, SHAPES[name], session.ceilings

    def work(engine: Engine) -> None:
        for batch in options.batch:
            session.attempt(
                name,
                f"{what}: decode {batch}",
                lambda batch=batch: decode(engine, shape, batch, ceilings, options, GREEDY),  # type: ignore[misc]
            )
        session.attempt(name, f"{what}: prefill", lambda: prefill(engine, shape, ceilings, options))
        largest = max(options.batch)
        session.attempt(
            name,
            f"{what}: drawn {largest}",
            lambda: decode(engine, shape, largest, ceilings, options, DRAWN),
        )
        for batch in sorted({min(options.batch), max(options.batch)}):
            session.attempt(
                name,
                f"{what}: profile {batch}",
                lambda batch=batch: gaps(engine, shape, batch, options),  # type: ignore[misc]
            )

    _with_engine(name, what, session, loaded, {}, work)


def part(
    name: str,
    what: str,
    session: Session,
    loaded: LoadedModel,
    batches: list[int],
    changes: dict[str, Any],
    *,
    params: SamplingParams = GREEDY,
    long: int = 0,
    is_scattered: bool = False,
) -> None:
    """Measure decode for a few batch sizes with other settings.

    Variants of modules and attention get the prefill too.
    """
    options, shape, ceilings = session.options, SHAPES[name], session.ceilings

    def work(engine: Engine) -> None:
        if is_scattered:
            scatter(engine)
        for batch in dict.fromkeys(batches):
            session.attempt(
                name,
                f"{what}: decode {batch}",
                lambda batch=batch: decode(engine, shape, batch, ceilings, options, params, long),  # type: ignore[misc]
            )
        if what.startswith("attention") or "modules" in what:
            session.attempt(
                name, f"{what}: prefill", lambda: prefill(engine, shape, ceilings, options)
            )

    _with_engine(name, what, session, loaded, {**changes, "long": long}, work)


def _with_engine(
    name: str,
    what: str,
    session: Session,
    loaded: LoadedModel,
    changes: dict[str, Any],
    work: Callable[[Engine], None],
) -> None:
    def inside() -> Any:
        engine = engine_of(loaded, configure(SHAPES[name], session.options, **changes))
        try:
            work(engine)
            graphs = getattr(engine.runner, "graphs", None)
            counts = (graphs.num_captured, graphs.num_replays) if graphs is not None else (0, 0)
            refusal = getattr(graphs, "refusal", None)
            fused = fused_modules(loaded.model)
            return {
                "engine": engine.runner.info.description,
                "graphs": counts,
                "refusal": refusal,
                "fused": fused,
            }
        finally:
            engine.stop(drain=False)

    session.attempt(name, what, inside)
    forget()
