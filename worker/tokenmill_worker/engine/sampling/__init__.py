"""Samples one token per row of the logits, by parameters per request, independent of the batch.

Belongs here: parameters, penalties, noise, truncation, grammars, drafts, and log-probabilities of
given tokens. Kernels that sample belong to `cpu` and `cuda`.
"""

from tokenmill_worker.engine.sampling.acceptance import AcceptanceLimit
from tokenmill_worker.engine.sampling.draft_gain import DraftGain
from tokenmill_worker.engine.sampling.drafts import Drafts
from tokenmill_worker.engine.sampling.grammar.compiler import GrammarCompiler
from tokenmill_worker.engine.sampling.grammar.errors import GrammarError
from tokenmill_worker.engine.sampling.prompt_lookup import PromptLookup
from tokenmill_worker.engine.sampling.sampled import Sampled
from tokenmill_worker.engine.sampling.sampler import Layout, Sampler
from tokenmill_worker.engine.sampling.scores import ScoredRows, Scores

__all__ = [
    "AcceptanceLimit",
    "DraftGain",
    "Drafts",
    "GrammarCompiler",
    "GrammarError",
    "Layout",
    "PromptLookup",
    "Sampled",
    "Sampler",
    "ScoredRows",
    "Scores",
]
