"""Compares attention backends: milliseconds per layer, bytes read and operations per second.

Backends take turns on the same problems. Each call uses another layer of the pool, so that keys and
values come from memory, as in a model.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenmill_worker.engine.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    backend_class,
    why_not,
)

SHAPES = {
    "smollm2": AttentionShape(9, 3, 64, 64**-0.5),
    "gemma3-270m": AttentionShape(4, 1, 256, 256**-0.5),
    "llama3-8b": AttentionShape(32, 8, 128, 128**-0.5),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_BACKENDS = {"cpu": "reference,cpu", "cuda": "reference,triton,flash,torch_varlen"}


@dataclass(frozen=True, slots=True)
class Problem:
    """Batch of sequences; `lens` has (query tokens, tokens in the cache) of each."""

    name: str
    lens: tuple[tuple[int, int], ...]

    @property
    def num_keys(self) -> int:
        return sum(seq_len for _, seq_len in self.lens)

    @property
    def num_pairs(self) -> int:
        """Number of (query, key) pairs within the causal mask."""
        return sum(q * s - q * (q - 1) // 2 for q, s in self.lens)


def problems(seed: int) -> list[Problem]:
    draw = random.Random(seed)
    contexts = [draw.randint(64, 1024) for _ in range(64)]
    decodes = tuple((1, n) for n in contexts)
    return [
        Problem("32 decodes at 64-1,024", decodes[:32]),
        Problem("64 decodes at 64-1,024", decodes),
        Problem("30 decodes + 256 of 768", (*decodes[:30], (256, 768))),
        Problem("prompt of 512", ((512, 512),)),
        Problem("256 of 4,096", ((256, 4096),)),
        Problem("1 decode at 1,024", ((1, 1024),)),
        Problem("1 decode at 16,384", ((1, 16_384),)),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="smollm2", choices=sorted(SHAPES))
    parser.add_argument("--backends", help="names with commas; default: those of the device")
    parser.add_argument("--dtypes", default="float32,float16", help="of the KV cache, with commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each backend; every layer once a turn"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> dict[str, object]:
    if options.threads:
        torch.set_num_threads(options.threads)
    device, shape = torch.device(options.device), SHAPES[options.shape]
    names = (options.backends or DEFAULT_BACKENDS[device.type]).split(",")
    figures: list[dict[str, object]] = []
    print(
        f"{'':<26}{'KV':<9}{'backend':<13}{'median ms':>10}{'best':>8}"
        f"{'GB/s':>8}{'GFLOP/s':>9}{'write ms':>10}"
    )
    for dtype_name in options.dtypes.split(","):
        dtype = DTYPES[dtype_name]
        usable = [
            name for name in names if _is_usable(name, device, dtype, shape, options.block_size)
        ]
        for problem in problems(options.seed):
            contenders = {
                name: Contender(backend_class(name)(), problem, shape, dtype, options)
                for name in usable
            }
            for _ in range(options.rounds):
                for contender in contenders.values():
                    contender.turn()
            figures += [
                _report(name, contender, dtype_name) for name, contender in contenders.items()
            ]
    return {"attention": figures, "threads": torch.get_num_threads()}


def _is_usable(
    name: str, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
) -> bool:
    reason = why_not(name, device, dtype, [shape], block_size)
    if reason is not None:
        print(f"{name} is left out: {reason}")
    return reason is None


class Contender:
    """One backend on one problem, with a pool of its layout that holds random keys and values."""

    def __init__(
        self,
        backend: AttentionBackend,
        problem: Problem,
        shape: AttentionShape,
        dtype: torch.dtype,
        options: argparse.Namespace,
    ) -> None:
        self.problem, self.backend, self.shape = problem, backend, shape
        device = torch.device(options.device)
        compute = torch.float32 if device.type == "cpu" else dtype
        random_numbers = torch.Generator().manual_seed(options.seed)
        self.metadata, num_blocks = _metadata(problem, options.block_size, device, random_numbers)
        block_shape = backend.block_shape(options.block_size, shape.num_kv_heads, shape.head_dim)
        self.pool = torch.empty(
            num_blocks, options.layers, 2, *block_shape, dtype=dtype, device=device
        )
        self.pool.normal_()
        num_tokens = sum(query_len for query_len, _ in problem.lens)

        def rows(heads: int) -> Tensor:
            return (
                torch.randn(num_tokens, heads, shape.head_dim, generator=random_numbers)
                .to(compute)
                .to(device)
            )

        self.query, self.key, self.value = (
            rows(shape.num_heads),
            rows(shape.num_kv_heads),
            rows(shape.num_kv_heads),
        )
        self.write_ms: list[float] = []
        self.attend_ms: list[float] = []

    def turn(self) -> None:
        views = [self.pool[:, layer] for layer in range(self.pool.shape[1])]
        writes = [
            partial(self.backend.write, self.key, self.value, view, self.metadata) for view in views
        ]
        attends = [
            partial(self.backend.attend, self.query, view, self.metadata, self.shape)
            for view in views
        ]
        for calls, times in ((writes, self.write_ms), (attends, self.attend_ms)):
            times.extend(
                self._on_device(calls)
                if self.pool.is_cuda
                else [self._time(call) for call in calls]
            )

    def _time(self, call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)

    def _on_device(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Time all calls together by the device's clock, and return an equal share for each, in ms.

        Reading the host's clock after each call would cost more than the call.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return [start.elapsed_time(end) / len(calls)] * len(calls)


def _metadata(
    problem: Problem, block_size: int, device: torch.device, random_numbers: torch.Generator
) -> tuple[AttentionMetadata, int]:
    counts = [-(-seq_len // block_size) for _, seq_len in problem.lens]
    order = torch.randperm(sum(counts), generator=random_numbers).int() + 1
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    slots = []
    ends = list(itertools.accumulate(counts))
    for row, count, end, (query_len, seq_len) in zip(
        table, counts, ends, problem.lens, strict=True
    ):
        row[:count] = order[end - count : end]
        positions = torch.arange(seq_len - query_len, seq_len)
        slots.append(row[positions // block_size].long() * block_size + positions % block_size)
    query_lens, seq_lens = zip(*problem.lens, strict=True)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=block_size,
        window=None,
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    return metadata, sum(counts) + 1


def _report(name: str, contender: Contender, dtype: str) -> dict[str, object]:
    shape, problem = contender.shape, contender.problem
    warm = contender.attend_ms[contender.pool.shape[1] :] or contender.attend_ms
    median, best = statistics.median(warm), min(warm)
    num_bytes = (
        2 * problem.num_keys * shape.num_kv_heads * shape.head_dim * contender.pool.element_size()
    )
    operations = 4 * problem.num_pairs * shape.num_heads * shape.head_dim
    figure = {
        "problem": problem.name,
        "kv_dtype": dtype,
        "backend": name,
        "median_ms": median,
        "best_ms": best,
        "gb_s": num_bytes / median / 1e6,
        "gflop_s": operations / median / 1e6,
        "write_ms": statistics.median(contender.write_ms),
    }
    print(
        f"{problem.name:<26}{dtype:<9}{name:<13}{median:>10.3f}{best:>8.3f}"
        f"{num_bytes / median / 1e6:>8.1f}"
        f"{operations / median / 1e6:>9.0f}{figure['write_ms']:>10.3f}",
        flush=True,
    )
    return figure
