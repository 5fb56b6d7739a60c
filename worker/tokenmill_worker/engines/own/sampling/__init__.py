"""Samples one token per row of the logits, by parameters per request, independent of the batch.

Belongs here: parameters, penalties, noise, truncation, grammars, drafts, and log-probabilities of
given tokens. Kernels that sample belong to `cpu` and `cuda`.
"""

from tokenmill_worker.engines.own.sampling.acceptance import AcceptanceLimit
from tokenmill_worker.engines.own.sampling.draft_gain import DraftGain
from tokenmill_worker.engines.own.sampling.drafts import Drafts
from tokenmill_worker.engines.own.sampling.grammar.compiler import GrammarCompiler
from tokenmill_worker.engines.own.sampling.grammar.errors import GrammarError
from tokenmill_worker.engines.own.sampling.prompt_lookup import PromptLookup
from tokenmill_worker.engines.own.sampling.sampled import Sampled
from tokenmill_worker.engines.own.sampling.sampler import Layout, Sampler
from tokenmill_worker.engines.own.sampling.scores import ScoredRows, Scores

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
