"""Makes pairs of a model and a draft model out of one model.

The draft model is the model itself, its first two layers, or, for one that is much smaller than its
model, itself beside a copy of three times its depth whose further layers add nothing.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill_worker.engine.model import model_files
from tokenmill_worker.engine.sampling import DraftGain

PAIRS = {
    "own": "the model drafts for itself: all drafts are right, none is cheap",
    "cut": "its first two layers draft: few drafts are right, all are cheap",
    "deep": "it drafts for a copy of three times its depth: all drafts are right, at a third",
}


class Closed(DraftGain):
    """Allows no drafts."""

    def begin(self, num_sequences: int) -> bool:
        super().begin(num_sequences)
        return False


def make(name: str, pair: str, folder: Path) -> tuple[str, str]:
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
