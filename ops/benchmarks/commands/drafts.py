"""`ops/bench drafts`: what drafts save, and what they cost where they save nothing.

The same jobs run with drafts and without, in turns: orders extracted into a JSON schema of eight
fields, whose forced tokens are drafts, and the same prompts answered freely. With `--draft-model`
they are answered freely with a draft model and without. All give the same tokens.
"""

import argparse
import time
from typing import Any

import msgspec
from rich.console import Console

from ops.benchmarks.measure.draft_models import PAIRS, compare_pair
from ops.benchmarks.measure.figures import alternate, medians
from ops.benchmarks.measure.tables import show
from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engine import Engine, EngineConfig, SamplingParams
from tokenmill_worker.engine.model import model_files

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
WORKLOADS = {
    "a JSON schema of eight fields": SamplingParams(
        temperature=0, max_tokens=200, response_format=ResponseFormat(json_schema=SCHEMA)
    ),
    "free text": SamplingParams(temperature=0, max_tokens=64, ignore_eos=True),
}
COLUMNS = {
    "tok_s": ("tok/s", "{:,.0f}"),
    "ratio": ("\nratio", "{:.2f}"),
    "steps": ("steps", "{:,.0f}"),
    "tokens": ("tokens", "{:,.0f}"),
    "accepted": ("drafts\naccepted", "{:,.0f}"),
}


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
    return {"results": _of_models(options) if options.draft_model else _of_forced(options)}


def _of_models(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    prompts = _prompts(options.model, options.jobs)

    def measure(engine: Engine, drafts: bool) -> tuple[dict[str, float], list[tuple[int, ...]]]:
        params = msgspec.structs.replace(WORKLOADS["free text"], speculate=drafts)
        return _measure(engine, prompts, params)

    results = {}
    for pair in options.draft_model:
        found = compare_pair(options.model, pair, options.max_num_seqs, options.rounds, measure)
        title = f"{options.jobs} jobs, {options.max_num_seqs} at once, {PAIRS[pair]}"
        show(Console(), title, found, COLUMNS | {"passes": ("draft\npasses", "{:,.0f}")})
        results[pair] = found
    return results


def _of_forced(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    engine = Engine.load(
        EngineConfig(model=options.model, dtype="float32", max_num_seqs=options.max_num_seqs)
    )
    prompts = _prompts(options.model, options.jobs)
    results = {
        name: _compare(engine, prompts, params, options.rounds)
        for name, params in WORKLOADS.items()
    }
    for name, found in results.items():
        title = f"{options.jobs} jobs, {options.max_num_seqs} at once, {name}; the same tokens"
        show(Console(), title, found, COLUMNS)
    return results


def _compare(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, rounds: int
) -> dict[str, dict[str, float]]:
    """Return the figures with drafts and without; raises RuntimeError if the answers differ."""
    cases = {"with drafts": params, "without": msgspec.structs.replace(params, speculate=False)}
    answers: dict[str, list[tuple[int, ...]]] = {}

    def measure(case: str, _number: int) -> dict[str, float]:
        figures, answers[case] = _measure(engine, prompts, cases[case])
        return figures

    alternate(list(cases), 1, measure)  # warms up
    found = {case: medians(done) for case, done in alternate(list(cases), rounds, measure).items()}
    if answers["with drafts"] != answers["without"]:
        raise RuntimeError("drafts changed an answer")
    found["with drafts"]["ratio"] = found["with drafts"]["tok_s"] / found["without"]["tok_s"]
    return found


def _prompts(model: str, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_files.resolve(model))
    texts = [
        f"Extract the order as JSON. Customer {number} of house {number * 7 % 13} orders "
        f"{number % 9 + 1} lamps at {number * 1.5 + 3} euros, paid by card, urgent.\n"
        for number in range(count)
    ]
    return [list(map(int, tokenizer(text)["input_ids"])) for text in texts]


def _measure(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    engine.scheduler.reset_prefix_cache()
    before, started = engine.stats(), time.perf_counter()
    outputs = engine.generate_batch(prompts, params)
    taken_s, after = time.perf_counter() - started, engine.stats()
    if failed := [output.error for output in outputs if output.error]:
        raise RuntimeError(f"{len(failed)} jobs failed: {failed[0]}")
    tokens = [tuple(output.token_ids) for output in outputs]
    count = sum(map(len, tokens))
    return {
        "tok_s": count / taken_s,
        "steps": after.steps - before.steps,
        "tokens": count,
        "accepted": after.accepted_tokens - before.accepted_tokens,
    }, tokens
