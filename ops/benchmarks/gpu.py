"""`ops/bench gpu`: how much of a CUDA device the engine uses, for models of well-known shapes with random weights.

Ceilings (bytes per second, operations per second) are measured in the same run; what a step must move and compute is
counted from the model's shapes. Per model: decode by batch, drawn tokens, one long prefill, where a step's time goes,
the same without graphs, without running ahead and without fused modules, the attention backends; then the mixed load
beside Transformers' continuous batching on a second model with the same weights. The record is written after every
measurement, and what `--limit` leaves no time for is named in it, so a run that is cut off has lost nothing.
`--device cpu --shape tiny --dtype float32` runs all of it anywhere. On a machine that has torch, transformers, rich and
msgspec and nothing else of ours: `python3 -m ops.benchmarks gpu --json gpu.json`.
"""

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from ops.benchmarks import gpu_report
from ops.benchmarks.device_ceilings import Ceilings, measure_ceilings
from ops.benchmarks.gpu_measures import DRAWN, GREEDY, configure, decode, engine_of, gaps, prefill
from ops.benchmarks.gpu_models import SHAPES, describe, forget, random_model
from ops.benchmarks.gpu_peer import beside
from worker.engine import Engine, EngineConfigError
from worker.engine.model.loader import LoadedModel

PAGED_BLOCK = 256  # what FlashAttention 2 asks of a block


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeatable; default: llama-3-8b, qwen3-4b")
    parser.add_argument("--batch", action="append", type=int, help="of decode; repeatable; default: 1, 32, 128, 256")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--context", type=int, default=512, help="tokens of each decoding sequence")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--attention", action="append", help="a backend to compare; repeatable; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--share", type=float, default=4.0, help="scale the mixed load's 64 requests")
    parser.add_argument("--rounds", type=int, default=2, help="of the mixed load")
    parser.add_argument("--no-peer", action="store_true", help="leave Transformers out")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which nothing more is begun")


def run(options: argparse.Namespace) -> dict[str, Any]:
    console = Console()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        console.print("ops/bench gpu: torch sees no CUDA device (--device cpu --shape tiny runs the same code)")
        return {"ok": False, "error": "no CUDA device"}
    options.batch = options.batch or [1, 32, 128, 256]
    session = Session(options, console)
    shapes = options.shape or ["llama-3-8b", "qwen3-4b"]
    for name in shapes:
        session.attempt(name, "model", lambda name=name: measure(name, session))  # type: ignore[misc]
        forget()
    for name in () if options.no_peer else shapes:
        session.attempt(name, "mixed", lambda name=name: beside(SHAPES[name], options))  # type: ignore[misc]
        forget()
    gpu_report.show(console, session.record)
    return session.record


class Session:
    """The record as it grows, and the time that is left."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self._console = console
        self._until = time.monotonic() + options.limit
        self._keep: Callable[[dict[str, Any]], None] = getattr(options, "keep", lambda _record: None)
        self.ceilings: Ceilings = measure_ceilings(torch.device(options.device), getattr(torch, options.dtype))
        self.record: dict[str, Any] = {
            "ok": True,
            "device": gpu_report.describe(options.device),
            "ceilings": asdict(self.ceilings),
            "results": {},
            "left_out": {},
        }
        self._keep(self.record)
        gpu_report.tell(console, "ceilings", self.record["ceilings"])

    def attempt(self, shape: str, what: str, work: Callable[[], Any]) -> Any:
        """Measure and keep; None if time is up or it failed, and the record says which."""
        left_out = self.record["left_out"]
        if time.monotonic() > self._until:
            left_out[f"{shape}: {what}"] = "no time was left"
            return None
        started = time.perf_counter()
        try:
            found = work()
        except EngineConfigError as error:  # this machine cannot: a backend that is not there, say
            left_out[f"{shape}: {what}"] = str(error)
            gpu_report.tell(self._console, f"{shape}: {what} is left out", str(error))
            return None
        except Exception as error:
            self.record["ok"] = False
            left_out[f"{shape}: {what}"] = f"{type(error).__name__}: {error}"
            self._console.print(traceback.format_exc(), markup=False, highlight=False)
            return None
        finally:
            self._keep(self.record)
        if found is not None:
            self.record["results"].setdefault(shape, {})[what] = found
            self._keep(self.record)
            gpu_report.tell(self._console, f"{shape}: {what} ({time.perf_counter() - started:.1f} s)", found)
        return found


def measure(name: str, session: Session) -> None:
    """All of one model but the peer."""
    options = session.options
    shape, dtype = SHAPES[name], getattr(torch, options.dtype)
    base = configure(shape, options)
    loaded = describe(random_model(shape, options.device, dtype), base)
    whole(name, "default", session, loaded)
    middle = [sorted(options.batch)[len(options.batch) // 2]]
    settings: tuple[tuple[str, dict[str, Any]], ...] = (
        ("without graphs", {"cuda_graphs": False}),
        ("without running ahead", {"async_batching": False}),
        ("without either", {"cuda_graphs": False, "async_batching": False}),
    )
    for what, changes in settings:
        part(name, what, session, loaded, middle, changes)
    for backend in options.attention or ("triton", "flash", "torch_varlen", "reference"):
        block = PAGED_BLOCK if backend in ("flash", "torch_varlen") else 16
        part(name, f"attention {backend}", session, loaded, middle, {"attention": backend, "block_size": block})
    del loaded
    forget()
    plain = describe(random_model(shape, options.device, dtype), base.replace(fuse=False))
    part(name, "without fused modules", session, plain, [min(options.batch), *middle], {"fuse": False})


def whole(name: str, what: str, session: Session, loaded: LoadedModel) -> None:
    """Everything that is measured of the engine as it is by default."""
    options, shape, ceilings = session.options, SHAPES[name], session.ceilings

    def work(engine: Engine) -> None:
        for batch in options.batch:
            session.attempt(
                name,
                f"{what}: decode {batch}",
                lambda batch=batch: decode(engine, shape, batch, ceilings, options, GREEDY),  # type: ignore[misc]
            )
        session.attempt(name, f"{what}: prefill", lambda: prefill(engine, shape, ceilings, options))
        for batch in sorted({min(options.batch), max(options.batch)}):
            session.attempt(
                name,
                f"{what}: profile {batch}",
                lambda batch=batch: gaps(engine, shape, batch, options),  # type: ignore[misc]
            )
        largest = max(options.batch)
        session.attempt(
            name, f"{what}: drawn {largest}", lambda: decode(engine, shape, largest, ceilings, options, DRAWN)
        )

    _with_engine(name, what, session, loaded, {}, work)


def part(
    name: str, what: str, session: Session, loaded: LoadedModel, batches: list[int], changes: dict[str, Any]
) -> None:
    """Decode of a few batches and the prefill, with other settings."""
    options, shape, ceilings = session.options, SHAPES[name], session.ceilings

    def work(engine: Engine) -> None:
        for batch in dict.fromkeys(batches):
            session.attempt(
                name,
                f"{what}: decode {batch}",
                lambda batch=batch: decode(engine, shape, batch, ceilings, options, GREEDY),  # type: ignore[misc]
            )
        if what.startswith("attention") or "fused" in what:
            session.attempt(name, f"{what}: prefill", lambda: prefill(engine, shape, ceilings, options))

    _with_engine(name, what, session, loaded, changes, work)


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
            counts = engine.runner.graph_counts
            refusal = getattr(getattr(engine.runner, "graphs", None), "refusal", None)
            return {"engine": engine.runner.description, "graphs": counts, "refusal": refusal}
        finally:
            engine.stop(drain=False)

    session.attempt(name, what, inside)
    forget()
