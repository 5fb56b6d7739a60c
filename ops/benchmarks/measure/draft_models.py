"""Compares an engine with a draft model with the same engine without it, on the same jobs.

The draft models are made of one model: itself, its first two layers, and, for one that is much
smaller than its model, itself beside a copy of three times its depth whose further layers add
nothing.
"""

import copy
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ops.benchmarks.measure.figures import alternate, medians
from tokenmill_worker.engine import Engine, EngineConfig
from tokenmill_worker.engine.execution.runner import ModelRunner
from tokenmill_worker.engine.model import model_files
from tokenmill_worker.engine.sampling import DraftGain

PAIRS = {
    "own": "the model drafts for itself: all drafts are right, none is cheap",
    "cut": "its first two layers draft: few drafts are right, all are cheap",
    "deep": "it drafts for a copy of three times its depth: all drafts are right, at a third",
}
WITHOUT, LOOKUP, MODEL, ALWAYS = "without", "prompt lookup", "draft model", "always drafting"
SPECULATIVE_TOKENS = 4

Measure = Callable[[Engine, bool], tuple[dict[str, float], list[tuple[int, ...]]]]


class _Closed(DraftGain):
    """Allows no drafts."""

    def begin(self, num_sequences: int) -> bool:
        super().begin(num_sequences)
        return False


def compare_pair(
    name: str, pair: str, max_num_seqs: int, rounds: int, measure: Measure
) -> dict[str, dict[str, float]]:
    """Return the figures without drafts, with prompt lookup alone, and with the draft model too,
    stopped where it does not pay or always drafting.

    `measure(engine, drafts)` runs the jobs. Raises RuntimeError if the answers differ.
    """
    with tempfile.TemporaryDirectory(prefix="tokenmill-drafts-") as folder:
        target, draft = _models(name, pair, Path(folder))
        engine = Engine.load(
            EngineConfig(
                model=target, draft_model=draft, speculative_tokens=SPECULATIVE_TOKENS,
                dtype="float32", max_num_seqs=max_num_seqs, verify_model=False,
            )
        )  # fmt: skip
    assert isinstance(engine.runner, ModelRunner)
    drafts = engine.runner.draft_model
    assert drafts is not None
    gains = {
        WITHOUT: _Closed(),
        LOOKUP: _Closed(),
        MODEL: DraftGain(),
        ALWAYS: DraftGain(clock=itertools.repeat(0.0).__next__),
    }
    answers: dict[str, list[tuple[int, ...]]] = {}

    def run(case: str, _number: int) -> dict[str, float]:
        drafts.gain, before = gains[case], drafts.num_passes
        figures, answers[case] = measure(engine, case != WITHOUT)
        return figures | {"passes": drafts.num_passes - before}

    alternate(list(gains), 1, run)  # warms up
    found = {case: medians(done) for case, done in alternate(list(gains), rounds, run).items()}
    if any(given != answers[WITHOUT] for given in answers.values()):
        raise RuntimeError("drafts changed an answer")
    for case in (MODEL, ALWAYS):
        found[case]["ratio"] = found[case]["tok_s"] / found[LOOKUP]["tok_s"]
    return found


def _models(name: str, pair: str, folder: Path) -> tuple[str, str]:
    """Make the models of a pair; return the names of the model and of its draft model."""
    if pair == "own":
        return name, name
    if pair == "cut":
        return name, str(_with_layers(name, folder, lambda layers: layers[:2]))
    return str(_with_layers(name, folder, _deepened)), name


def _with_layers(name: str, folder: Path, change: Callable[[Any], Any]) -> Path:
    """Save a model with changed layers, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = model_files.resolve(name)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    layers = change(model.model.layers)
    model.model.layers = layers
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = ["full_attention"] * len(layers)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


def _deepened(layers: Any) -> Any:
    """Return the layers and two copies of each, whose outputs are zeros."""
    from torch import nn

    added = [copy.deepcopy(layer) for layer in (*layers, *layers)]
    for layer in added:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return nn.ModuleList([*layers, *added])
