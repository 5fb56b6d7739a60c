"""`ops/bench quality`: the cost of rounding weights or keys and values: perplexity, equal tokens.

Perplexity is measured on English text, by the log-probabilities of a prompt's tokens, as the engine
returns them to a user; greedy answers are compared token by token. The text is the language
reference that Python ships for its own `help()` (pydoc_data.topics): the same on every machine,
tens of thousands of tokens, prose among code.
"""

import argparse
import importlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from ops.benchmarks.measure.generation import generate
from ops.benchmarks.measure.tables import show
from tokenmill_worker.engines.own import EngineConfig, EngineConfigError, SamplingParams
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.model.model_files import resolve

SOURCE = "pydoc_data.topics"
QUANTIZATIONS = ("int8", "int4", "fp8")
WINDOWS, LENGTH = 16, 256  # pieces of text, and tokens of each
NUM_ANSWERED = 32  # greedy tokens after the first half of a piece
SCORED = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
COLUMNS = {
    "perplexity": ("perplexity", "{:.3f}"),
    "equal_tokens": ("tokens before\na difference", "{:.1%}"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean negative log-likelihood per token, and greedy answers to the windows' first halves."""

    nll: float
    answers: tuple[tuple[int, ...], ...]


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


def run(options: argparse.Namespace) -> dict[str, object]:
    console = Console()
    kinds = ["float32", *options.kinds.split(",")]
    try:
        configs = {kind: config_of(options.model, kind) for kind in kinds}
    except EngineConfigError as error:
        raise SystemExit(f"ops/bench quality: {error}") from error
    windows = text_windows(options.model, WINDOWS, LENGTH)
    measured: dict[str, Measured] = {}
    for kind, config in configs.items():
        with console.status(kind):
            measured[kind] = measure(config, windows, NUM_ANSWERED)
    figures = {kind: _figures(one, measured["float32"]) for kind, one in measured.items()}
    title = f"{options.model} on {len(windows)} × {LENGTH} tokens of {SOURCE}"
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


def config_of(model: str, kind: str) -> EngineConfig:
    """Return the configuration that a kind stands for; raises EngineConfigError."""
    settings: dict[str, Any] = {}
    for part in [] if kind == "float32" else kind.split("+"):
        if part == "scales":
            settings["calculate_kv_scales"] = True
        else:
            settings["quantization" if part in QUANTIZATIONS else "kv_dtype"] = part
    is_on_gpu = settings.get("quantization") == "fp8"
    return EngineConfig(
        model=model, max_memory_gib=1.0, max_model_len=LENGTH + NUM_ANSWERED + 1,
        dtype="bfloat16" if is_on_gpu else "float32", device="cuda" if is_on_gpu else "cpu",
        **settings,
    )  # fmt: skip


def measure(config: EngineConfig, windows: Sequence[Sequence[int]], num_answers: int) -> Measured:
    """Score each window in a step of its own: rounded activations would differ between chunks."""
    greedy = SamplingParams(temperature=0.0, max_tokens=num_answers, ignore_eos=True)
    engine = Engine.load(config)
    try:
        scored = [generate(engine, [window], [SCORED])["request-0"] for window in windows]
        engine.scheduler.reset_prefix_cache()
        halves = [window[: len(window) // 2] for window in windows]
        answered = generate(engine, halves, [greedy] * len(halves))
    finally:
        engine.stop(drain=False)
    nll = -statistics.fmean(one.logprob for each in scored for one in each.prompt_logprobs)
    return Measured(nll, tuple(tuple(each.token_ids) for each in answered.values()))


def _figures(one: Measured, exact: Measured) -> dict[str, float]:
    same = sum(map(_common, one.answers, exact.answers))
    return {
        "perplexity": math.exp(one.nll),
        "equal_tokens": same / sum(len(answer) for answer in exact.answers),
    }


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the equal tokens before the first difference."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((number for number, (a, b) in pairs if a != b), len(one))
