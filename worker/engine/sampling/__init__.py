"""Sampling: one token per row of the logits, per-request parameters, results independent of the batch."""

from worker.engine.sampling.compilation import GrammarCompiler, GrammarError
from worker.engine.sampling.lookup import PromptLookup
from worker.engine.sampling.sampled import Sampled
from worker.engine.sampling.sampler import Layout, Sampler

__all__ = [
    "GrammarCompiler",
    "GrammarError",
    "Layout",
    "PromptLookup",
    "Sampled",
    "Sampler",
]
