"""Abilities of this engine."""

from __future__ import annotations

import msgspec

from tokenmill_worker.contract.capabilities import STRUCTURED, Capabilities

CAPABILITIES = Capabilities(
    structured=STRUCTURED,
    tool_grammars=True,
    thinking_budget=True,
    scores=True,
    prompt_logprobs=True,
    adapters=True,
    exact_resume=True,
)
WITHOUT_GRAMMARS = msgspec.structs.replace(
    CAPABILITIES, structured=(), tool_grammars=False, thinking_budget=False
)  # with a model whose folder has no tokenizer
