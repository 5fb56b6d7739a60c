"""`ops/bench quality`: the cost of rounding weights or keys and values: perplexity, equal tokens.

Perplexity is measured on English text, and greedy tokens are compared. The text is the language
reference that Python ships for its own `help()` (pydoc_data.topics): the same on every machine,
tens of thousands of tokens, prose among code. The model runs through the engine, as it is served.
"""

import argparse
import importlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from ops.benchmarks.measure.scoring import Scorer
from ops.benchmarks.measure.tables import show
from tokenmill_worker.engine import Engine, EngineConfig, EngineConfigError, SamplingParams
from tokenmill_worker.engine.model.model_files import resolve

SOURCE = "pydoc_data.topics"
QUANTIZATIONS = ("int8", "int4", "fp8")
COLUMNS = {
    "perplexity": ("perplexity", "{:.3f}"),
    "nll": ("loss", "{:.4f}"),
    "ratio": ("×\nfloat32", "{:.4f}"),
    "equal_answers": ("equal\nanswers", "{:.0%}"),
    "equal_tokens": ("tokens before\na difference", "{:.1%}"),
    "seconds": ("s", "{:.0f}"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean negative log-likelihood per token, and greedy answers to the windows' beginnings."""

    nll: float
    answers: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--kinds",
        default="int8,int4,float8_e4m3fn",
        help=(
            "compared with float32, with commas: of weights, of keys and values, or both "
            "(int8+float8_e4m3fn); +scales calculates scales of keys and values; "
            "fp8 runs on a GPU, in bfloat16"
        ),
    )
    parser.add_argument("--windows", type=int, default=16, help="pieces of text")
    parser.add_argument("--length", type=int, default=256, help="tokens of a piece")
    parser.add_argument(
        "--answers", type=int, default=32, help="greedy tokens after the first half of a piece"
    )
    parser.add_argument("--threads", type=int)


def run(options: argparse.Namespace) -> dict[str, object]:
    console = Console()
    try:
        configs = {
            kind: config_of(options, kind) for kind in ["float32", *options.kinds.split(",")]
        }
    except EngineConfigError as error:
        raise SystemExit(f"ops/bench quality: {error}") from error
    windows = text_windows(options.model, options.windows, options.length)
    measured: dict[str, Measured] = {}
    for kind, config in configs.items():
        with console.status(f"{kind}: {len(windows)} pieces of {options.length} tokens"):
            measured[kind] = measure(options, config, windows)
    figures = {kind: _figures(one, measured["float32"]) for kind, one in measured.items()}
    title = f"{options.model} on {len(windows)} × {options.length} tokens of {SOURCE}"
    show(console, title, figures, COLUMNS)
    return {"results": {"quality": figures}}


def text_windows(model: str, count: int, length: int) -> list[list[int]]:
    """Cut pieces of the text, spread evenly over it."""
    topics: dict[str, str] = importlib.import_module(SOURCE).topics
    tokenizer = AutoTokenizer.from_pretrained(resolve(model))
    ids: list[int] = tokenizer("\n".join(topics[name] for name in sorted(topics)), verbose=False)[
        "input_ids"
    ]
    step = max(length, len(ids) // count)
    return [ids[start : start + length] for start in range(0, len(ids) - length + 1, step)][:count]


def chosen(kind: str) -> dict[str, Any]:
    """Return the engine's settings that a kind stands for."""
    parts = [] if kind == "float32" else kind.split("+")
    settings: dict[str, Any] = {"calculate_kv_scales": True} if "scales" in parts else {}
    for part in parts:
        if part != "scales":
            settings["quantization" if part in QUANTIZATIONS else "kv_dtype"] = part
    return settings


def config_of(options: argparse.Namespace, kind: str) -> EngineConfig:
    """Raises EngineConfigError."""
    settings = chosen(kind)
    is_on_gpu = settings.get("quantization") == "fp8"
    return EngineConfig(
        model=options.model, max_memory_gib=1.0, num_threads=options.threads or None,
        dtype="bfloat16" if is_on_gpu else "float32", device="cuda" if is_on_gpu else "cpu",
        max_model_len=options.length + options.answers + 1, **settings,
    )  # fmt: skip


def measure(
    options: argparse.Namespace, config: EngineConfig, windows: Sequence[list[int]]
) -> Measured:
    started = time.perf_counter()
    if options.threads:
        torch.set_num_threads(options.threads)
    nll = statistics.fmean(map(Scorer(config, options.length).nll, windows))
    with Engine.load(config) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=options.answers, ignore_eos=True)
        prompts = [window[: options.length // 2] for window in windows]
        outputs = engine.generate_batch(prompts, [params] * len(prompts))
    return Measured(
        nll, tuple(output.token_ids for output in outputs), time.perf_counter() - started
    )


def _figures(one: Measured, exact: Measured) -> dict[str, float]:
    pairs = list(zip(one.answers, exact.answers, strict=True))
    same = sum(_common(a, b) for a, b in pairs)
    return {
        "perplexity": one.perplexity,
        "nll": one.nll,
        "ratio": one.perplexity / exact.perplexity,
        "equal_answers": sum(a == b for a, b in pairs) / len(pairs),
        "equal_tokens": same / sum(len(b) for _, b in pairs),
        "seconds": one.seconds,
    }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the equal tokens before the first difference."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
