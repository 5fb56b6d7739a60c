"""`ops/bench drafts`: what drafts save, and what they cost where they save nothing.

The same jobs run with drafts and without, in turns, together and one at a time: orders extracted
into a JSON schema of eight fields, whose forced tokens are drafts; the same prompts answered
freely; and summaries that quote their text. Prompt lookup drafts in all of them. With
`--draft-model` the orders are answered freely with a draft model, stopped where it does not pay or
always drafting, with prompt lookup alone and without both. All give the same tokens.
"""

import argparse
import importlib
import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ops.benchmarks.commands.quality import SOURCE
from ops.benchmarks.measure.draft_models import PAIRS, Closed, make
from ops.benchmarks.measure.figures import alternate, medians
from ops.benchmarks.measure.tables import show
from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engine import Engine, EngineConfig, SamplingParams
from tokenmill_worker.engine.model import model_files
from tokenmill_worker.engine.sampling import DraftGain

_TEXT = {"type": "string", "maxLength": 12}
FIELDS: dict[str, object] = {
    "customer_name": _TEXT,
    "order_number": _TEXT,
    "delivery_address": _TEXT,
    "product_category": _TEXT,
    "quantity": {"type": "integer", "minimum": 0, "maximum": 999},
    "unit_price": {"type": "number"},
    "payment_method": {"enum": ["card", "invoice", "transfer"]},
    "is_urgent": {"type": "boolean"},
}
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
FORCED = SamplingParams(
    temperature=0, max_tokens=200, response_format=ResponseFormat(json_schema=SCHEMA)
)
FREE = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
WORKLOADS = {
    "extraction": FORCED,
    "free text": FREE,
    "quotes": SamplingParams(temperature=0, max_tokens=96),
}
ARTICLE_CHARS = 900
SPECULATIVE_TOKENS = 4
COLUMNS = {
    "tok_s": ("tok/s", "{:,.0f}"),
    "ratio": ("\nratio", "{:.2f}"),
    "cpu_ratio": ("of CPU\ntime", "{:.2f}"),
    "steps": ("steps", "{:,.0f}"),
    "tokens": ("tokens", "{:,.0f}"),
    "accepted": ("drafts\naccepted", "{:,.0f}"),
    "passes": ("draft\npasses", "{:,.0f}"),
}

Figures = dict[str, dict[str, float]]
Batches = list[list[list[int]]]  # prompts that run together


@dataclass(frozen=True, slots=True)
class Case:
    """Sampling parameters of all jobs; with a draft model, also what decides when it drafts."""

    params: SamplingParams
    gain: DraftGain | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    listing = "; ".join(f"{name}: {what}" for name, what in PAIRS.items())
    parser.add_argument(
        "--draft-model",
        choices=PAIRS,
        action="append",
        default=[],
        help=f"pairs of models. {listing}",
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Figures] = {}
    if options.draft_model:
        prompts = _prompts(options.model, _orders(options.jobs))
        for pair in options.draft_model:
            results[pair] = _of_models(pair, [prompts], options)
    else:
        results = _of_workloads(options)
    for name, found in results.items():
        title = f"{options.jobs} jobs, {options.max_num_seqs} at once, {PAIRS.get(name, name)}"
        show(Console(), title if name in PAIRS else name, found, COLUMNS)
    return {"results": results}


def _of_workloads(options: argparse.Namespace) -> dict[str, Figures]:
    """Return the figures of each workload, together and, for fewer jobs, one at a time."""
    engine = Engine.load(
        EngineConfig(
            model=options.model, speculative_tokens=SPECULATIVE_TOKENS, dtype="float32",
            max_num_seqs=options.max_num_seqs,
        )
    )  # fmt: skip
    orders, articles = _orders(options.jobs), _articles(options.model, options.jobs)
    results = {}
    for name, params in WORKLOADS.items():
        prompts = _prompts(options.model, articles if name == "quotes" else orders)
        alone = [[prompt] for prompt in prompts[: max(1, options.jobs // options.max_num_seqs)]]
        without = msgspec.structs.replace(params, speculate=False)
        cases = {"with drafts": Case(params), "without": Case(without)}
        for at_once, batches in ((options.max_num_seqs, [prompts]), (1, alone)):
            title = f"{name}, {sum(map(len, batches))} jobs, {at_once} at once"
            results[title] = compare(engine, batches, cases, "without", options.rounds)
    return results


def _of_models(pair: str, batches: Batches, options: argparse.Namespace) -> Figures:
    with tempfile.TemporaryDirectory(prefix="tokenmill-drafts-") as folder:
        target, draft = make(options.model, pair, Path(folder))
        engine = Engine.load(
            EngineConfig(
                model=target, draft_model=draft, speculative_tokens=SPECULATIVE_TOKENS,
                dtype="float32", max_num_seqs=options.max_num_seqs, verify_model=False,
            )
        )  # fmt: skip
    cases = {
        "without": Case(msgspec.structs.replace(FREE, speculate=False), Closed()),
        "prompt lookup": Case(FREE, Closed()),
        "draft model": Case(FREE, DraftGain()),
        "always drafting": Case(FREE, DraftGain(clock=itertools.repeat(0.0).__next__)),
    }
    return compare(engine, batches, cases, "prompt lookup", options.rounds)


def compare(
    engine: Engine, batches: Batches, cases: dict[str, Case], base: str, rounds: int
) -> Figures:
    """Return the figures of each case, medians over the rounds, with the ratios to the base: of the
    tokens per second, and of those per second of CPU time.

    Raises RuntimeError if the answers differ.
    """
    answers: dict[str, list[tuple[int, ...]]] = {}

    def measure(name: str, _number: int) -> dict[str, float]:
        figures, answers[name] = _run_jobs(engine, batches, cases[name])
        return figures

    alternate(list(cases), 1, measure)  # warms up
    done = alternate(list(cases), rounds, measure)
    if any(given != answers[base] for given in answers.values()):
        raise RuntimeError("drafts changed an answer")
    for rounds_of in done.values():
        for figures, plain in zip(rounds_of, done[base], strict=True):
            figures["ratio"] = figures["tok_s"] / plain["tok_s"]
            figures["cpu_ratio"] = plain["cpu_s"] / figures["cpu_s"]
    return {name: medians(rounds_of) for name, rounds_of in done.items()}


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_files.resolve(model))


def _prompts(model: str, texts: list[str]) -> list[list[int]]:
    tokenizer = _tokenizer(model)
    return [list(map(int, tokenizer(text)["input_ids"])) for text in texts]


def _orders(count: int) -> list[str]:
    return [
        f"Extract the order as JSON. Customer {number} of house {number * 7 % 13} orders "
        f"{number % 9 + 1} lamps at {number * 1.5 + 3} euros, paid by card, urgent.\n"
        for number in range(count)
    ]


def _articles(model: str, count: int) -> list[str]:
    """Return requests for summaries of parts of the text that `ops/bench quality` reads."""
    tokenizer = _tokenizer(model)
    text = " ".join(" ".join(importlib.import_module(SOURCE).topics.values()).split())
    ask = "Summarise this text. Quote its most important sentences word for word.\n\n"
    chats = [
        [{"role": "user", "content": ask + text[start : start + ARTICLE_CHARS]}]
        for start in range(0, count * ARTICLE_CHARS, ARTICLE_CHARS)
    ]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]


def _run_jobs(
    engine: Engine, batches: Batches, case: Case
) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    """Run each batch after the one before; return the figures of all and the answers."""
    drafts = getattr(engine.runner, "draft_model", None)
    if drafts is not None and case.gain is not None:
        drafts.gain = case.gain
    passes = drafts.num_passes if drafts is not None else 0
    engine.scheduler.reset_prefix_cache()
    before, started, cpu_s = engine.stats(), time.perf_counter(), time.process_time()
    outputs = [out for prompts in batches for out in engine.generate_batch(prompts, case.params)]
    taken_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    after = engine.stats()
    if failed := [output.error for output in outputs if output.error]:
        raise RuntimeError(f"{len(failed)} jobs failed: {failed[0]}")
    tokens = [tuple(output.token_ids) for output in outputs]
    count = sum(map(len, tokens))
    figures = {
        "tok_s": count / taken_s,
        "cpu_s": cpu_s,
        "steps": after.steps - before.steps,
        "tokens": count,
        "accepted": after.accepted_tokens - before.accepted_tokens,
    }
    if drafts is not None:
        figures["passes"] = drafts.num_passes - passes
    return figures, tokens
