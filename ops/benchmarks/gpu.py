"""`ops/bench gpu`: how much of a CUDA device the engine uses, for models of well-known shapes with random weights.

Ceilings (bytes per second of a copy, operations per second of a matrix product) are measured in the same run; what a
step must move and compute is counted from the model's shapes. Decode by batch size against the bandwidth, one long
prefill against the operations, per attention backend; with `--peer`, the mixed workload beside Transformers; with
`--profile`, the gaps between kernels that cost more than 2 %. `--device cpu --shape tiny` runs all of it anywhere.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ops.benchmarks import comparison
from ops.benchmarks.device_ceilings import Ceilings, measure_ceilings, synchronise
from ops.benchmarks.device_gaps import gaps_of
from ops.benchmarks.peers.environments import ROOT
from worker.engine import Engine, EngineConfig, SamplingParams


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder as its configuration names it; the embedding is not counted, its rows are only looked up."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 16_384

    @property
    def num_weights(self) -> int:
        """That a token's products touch."""
        heads = self.num_attention_heads + 2 * self.num_key_value_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_attention_heads)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size) + self.head_weights

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * tokens * itemsize

    def prefill_operations(self, tokens: int) -> int:
        """Products of every token, the head of one, and causal attention."""
        attention = 2 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * tokens * tokens
        return 2 * (self.num_weights - self.head_weights) * tokens + 2 * self.head_weights + attention


_SLACK = 64  # tokens that sequences make before the measured steps
SHAPES = {
    "llama-3-8b": Shape("llama", 4096, 32, 32, 8, 128, 14_336, 128_256),
    "qwen3-4b": Shape("qwen3", 2560, 36, 32, 8, 128, 9728, 151_936),
    "tiny": Shape("llama", 64, 2, 4, 2, 16, 128, 512),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeatable; default: llama-3-8b, qwen3-4b")
    parser.add_argument("--batch", action="append", type=int, help="of decode; repeatable; default: 1, 32, 128, 256")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--context", type=int, default=512, help="tokens of each decoding sequence")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--attention", action="append", help="a backend; repeatable; default: what is chosen")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--peer", action="append", default=[], choices=("transformers",), help="on the mixed workload")
    parser.add_argument("--share", type=float, default=1.0, help="scale the mixed workload's requests")
    parser.add_argument("--profile", action="store_true", help="name the gaps of a decode step, largest batch")


def run(options: argparse.Namespace) -> dict[str, Any]:
    console = Console()
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("ops/bench gpu: torch sees no CUDA device (--device cpu --shape tiny runs the same code)")
        return {"ok": False, "error": "no CUDA device"}
    ceilings = measure_ceilings(torch.device(options.device), getattr(torch, options.dtype))
    console.print(f"ceilings: {ceilings.bytes_s / 1e9:,.1f} GB/s read, {ceilings.operations_s / 1e12:,.2f} TFLOP/s")
    results: dict[str, dict[str, Any]] = {}
    for name in options.shape or ["llama-3-8b", "qwen3-4b"]:
        folder = model_folder(name, options.device, options.dtype)
        found = [measure(name, folder, backend, ceilings, options) for backend in options.attention or ["auto"]]
        _show(console, name, found)
        results[name] = {"backends": found}
        if options.peer:
            results[name]["mixed"] = _beside(options, folder)
    return {"ceilings": asdict(ceilings), "results": results}


def model_folder(name: str, device: str, dtype: str) -> Path:
    """Random weights on disk, made once: every engine then loads the same."""
    folder = ROOT / ".cache" / "bench-models" / f"{name}-{dtype}"
    if (folder / "finished").exists():
        return folder
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = asdict(SHAPES[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, tie_word_embeddings=False, eos_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    (folder / "finished").touch()
    return folder


def measure(name: str, folder: Path, backend: str, ceilings: Ceilings, options: argparse.Namespace) -> dict[str, Any]:
    """One backend on one model: decode by batch, a prefill, and the gaps."""
    batches = options.batch or [1, 32, 128, 256]
    shape, block = SHAPES[name], 16
    tokens = max(max(batches) * (options.context + options.steps + _SLACK + 2 * block), options.prefill + 2 * block)
    config = EngineConfig(
        model=str(folder), dtype=options.dtype, device=options.device, block_size=block,
        attention=backend,  # type: ignore[arg-type]
        num_blocks=tokens // block + max(batches) + 2, max_num_seqs=max(batches), prefix_cache=False,
        max_num_batched_tokens=max(options.prefill, max(batches)), max_model_len=shape.max_position_embeddings,
    )  # fmt: skip
    engine = Engine.load(config)
    try:
        decode = {batch: _decode(engine, shape, batch, ceilings, options) for batch in batches}
        prefill = _prefill(engine, shape, ceilings, options)
        gaps = _gaps(engine, max(batches), options) if options.profile else None
    finally:
        engine.stop(drain=False)
    return {"attention": engine.runner.config.attention, "decode": decode, "prefill": prefill, "gaps": gaps}


def _decode(
    engine: Engine, shape: Shape, batch: int, ceilings: Ceilings, options: argparse.Namespace
) -> dict[str, float]:
    requests = _start(engine, shape, batch, options)
    times = []
    for _ in range(options.steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    synchronise(torch.device(options.device))
    _end(engine, requests)
    step_s = statistics.median(times)
    itemsize = torch.empty((), dtype=getattr(torch, options.dtype)).element_size()
    context = options.context + options.steps // 2
    moved = shape.num_weights * itemsize + batch * shape.kv_bytes(context, itemsize)
    computed = 2 * shape.num_weights * batch
    floor_s = max(moved / ceilings.bytes_s, computed / ceilings.operations_s)
    return {
        "step_ms": 1e3 * step_s,
        "tokens_s": batch / step_s,
        "share_of_bandwidth": moved / step_s / ceilings.bytes_s,
        "share_of_roofline": floor_s / step_s,
    }


def _prefill(engine: Engine, shape: Shape, ceilings: Ceilings, options: argparse.Namespace) -> dict[str, float]:
    times = []
    for seed in range(4):
        started = time.perf_counter()
        engine.add_request(_prompt(shape, options.prefill, seed), SamplingParams(temperature=0, max_tokens=1))
        while engine.has_work:
            engine.step()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[1:])
    share = shape.prefill_operations(options.prefill) / seconds / ceilings.operations_s
    return {"seconds": seconds, "tokens_s": options.prefill / seconds, "share_of_operations": share}


def _gaps(engine: Engine, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    requests = _start(engine, SHAPES[(options.shape or ["llama-3-8b"])[0]], batch, options)
    found = gaps_of(engine.step, torch.device(options.device), min(20, options.steps))
    _end(engine, requests)
    return found


def _start(engine: Engine, shape: Shape, batch: int, options: argparse.Namespace) -> list[str]:
    """So many sequences decode when this returns, graphs captured and caches warm."""
    params = SamplingParams(temperature=0, max_tokens=options.steps + _SLACK, ignore_eos=True)
    requests = engine.add_requests([_prompt(shape, options.context, seed) for seed in range(batch)], params)
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {event.request_id for event in engine.step() if event.token_ids}
    for _ in range(3):
        engine.step()
    return requests


def _end(engine: Engine, requests: Sequence[str]) -> None:
    for request in requests:
        engine.cancel(request)
    while engine.has_work:
        engine.step()


def _prompt(shape: Shape, count: int, seed: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 7919 + 31 * index) % (shape.vocab_size - 1) for index in range(count))


def _beside(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    arguments = argparse.Namespace(
        workload=["mixed"], rounds=2, seed=0, share=options.share, model=str(folder), dtype=options.dtype, threads=0,
        pool_tokens=131_072, max_batch_tokens=8192, max_sequences=256, set=[f"device={options.device}"],
    )  # fmt: skip
    return comparison.compare(arguments, [comparison.OURS, *options.peer])


def _show(console: Console, name: str, found: list[dict[str, Any]]) -> None:
    table = Table(title=f"{name}: share of the ceilings, measured in this run", title_justify="left")
    for column in ("attention", "what", "tokens/s", "ms a step", "of the bandwidth", "of the roofline"):
        table.add_column(column, justify="left" if column in ("attention", "what") else "right")
    for each in found:
        for batch, figures in each["decode"].items():
            table.add_row(
                each["attention"], f"decode, {batch}", f"{figures['tokens_s']:,.0f}", f"{figures['step_ms']:.2f}",
                f"{figures['share_of_bandwidth']:.1%}", f"{figures['share_of_roofline']:.1%}",
            )  # fmt: skip
        prefill = each["prefill"]
        took, share = f"{1e3 * prefill['seconds']:.1f}", f"{prefill['share_of_operations']:.1%}"
        table.add_row(each["attention"], "prefill", f"{prefill['tokens_s']:,.0f}", took, "", share)
        for gap in (each["gaps"] or {}).get("gaps", []):
            took, share = f"{gap['ms']:.3f}", f"{gap['share']:.1%}"
            table.add_row(each["attention"], f"gap: {gap['between']}", "", took, "", share)
    console.print(table)
