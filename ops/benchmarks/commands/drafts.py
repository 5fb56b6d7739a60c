"""`ops/bench drafts`: what drafts save, and what they cost where they save nothing.

The same jobs run with drafts and without, in turns: orders extracted into a JSON schema of eight
fields, whose forced tokens are drafts, and the same prompts answered freely. With `--draft-model`
they are answered freely with a draft model, stopped where it does not pay or always drafting, with
prompt lookup alone and without both. All give the same tokens.
"""

import argparse
import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

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
WORKLOADS = {"a JSON schema of eight fields": FORCED, "free text": FREE}
SPECULATIVE_TOKENS = 4  # of a draft model
COLUMNS = {
    "tok_s": ("tok/s", "{:,.0f}"),
    "ratio": ("\nratio", "{:.2f}"),
    "steps": ("steps", "{:,.0f}"),
    "tokens": ("tokens", "{:,.0f}"),
    "accepted": ("drafts\naccepted", "{:,.0f}"),
    "passes": ("draft\npasses", "{:,.0f}"),
}

Figures = dict[str, dict[str, float]]


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
    prompts = _prompts(options.model, options.jobs)
    results = {}
    if options.draft_model:
        for pair in options.draft_model:
            results[pair] = _of_models(pair, prompts, options)
    else:
        settings = {"model": options.model, "max_num_seqs": options.max_num_seqs}
        engine = Engine.load(EngineConfig(**settings, dtype="float32"))
        for name, params in WORKLOADS.items():
            without = msgspec.structs.replace(params, speculate=False)
            cases = {"with drafts": Case(params), "without": Case(without)}
            results[name] = compare(engine, prompts, cases, "without", options.rounds)
    for name, found in results.items():
        title = f"{options.jobs} jobs, {options.max_num_seqs} at once, {PAIRS.get(name, name)}"
        show(Console(), title, found, COLUMNS)
    return {"results": results}


def _of_models(pair: str, prompts: list[list[int]], options: argparse.Namespace) -> Figures:
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
    return compare(engine, prompts, cases, "prompt lookup", options.rounds)


def compare(
    engine: Engine, prompts: list[list[int]], cases: dict[str, Case], base: str, rounds: int
) -> Figures:
    """Return the figures of each case, with the ratio to the base's tokens per second.

    Raises RuntimeError if the answers differ.
    """
    answers: dict[str, list[tuple[int, ...]]] = {}

    def measure(name: str, _number: int) -> dict[str, float]:
        figures, answers[name] = _run_jobs(engine, prompts, cases[name])
        return figures

    alternate(list(cases), 1, measure)  # warms up
    found = {name: medians(done) for name, done in alternate(list(cases), rounds, measure).items()}
    if any(given != answers[base] for given in answers.values()):
        raise RuntimeError("drafts changed an answer")
    for figures in found.values():
        figures["ratio"] = figures["tok_s"] / found[base]["tok_s"]
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


def _run_jobs(
    engine: Engine, prompts: list[list[int]], case: Case
) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    drafts = getattr(engine.runner, "draft_model", None)
    if drafts is not None and case.gain is not None:
        drafts.gain = case.gain
    passes = drafts.num_passes if drafts is not None else 0
    engine.scheduler.reset_prefix_cache()
    before, started = engine.stats(), time.perf_counter()
    outputs = engine.generate_batch(prompts, case.params)
    taken_s, after = time.perf_counter() - started, engine.stats()
    if failed := [output.error for output in outputs if output.error]:
        raise RuntimeError(f"{len(failed)} jobs failed: {failed[0]}")
    tokens = [tuple(output.token_ids) for output in outputs]
    count = sum(map(len, tokens))
    figures = {
        "tok_s": count / taken_s,
        "steps": after.steps - before.steps,
        "tokens": count,
        "accepted": after.accepted_tokens - before.accepted_tokens,
    }
    if drafts is not None:
        figures["passes"] = drafts.num_passes - passes
    return figures, tokens
