"""Sampling: one token per row of the logits, per-request parameters, results independent of the
batch.
"""

from tokenmill_worker.engine.sampling.grammar.compiler import GrammarCompiler, GrammarError
from tokenmill_worker.engine.sampling.prompt_lookup import PromptLookup
from tokenmill_worker.engine.sampling.sampled import Sampled
from tokenmill_worker.engine.sampling.sampler import Layout, Sampler

__all__ = [
    "GrammarCompiler",
    "GrammarError",
    "Layout",
    "PromptLookup",
    "Sampled",
    "Sampler",
]
