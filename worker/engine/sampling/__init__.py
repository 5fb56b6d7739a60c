"""Sampling: one token per row of the logits, per-request parameters, results independent of the batch."""

from worker.engine.sampling.sampled import Sampled
from worker.engine.sampling.sampler import Sampler
from worker.engine.sampling.structured import GrammarCompiler

__all__ = ["GrammarCompiler", "Sampled", "Sampler"]
