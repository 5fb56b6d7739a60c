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


def capabilities_of(*, can_structure: bool) -> Capabilities:
    """Return the abilities with a model; without `can_structure` it has no grammar compiler."""
    if can_structure:
        return CAPABILITIES
    return msgspec.structs.replace(
        CAPABILITIES, structured=(), tool_grammars=False, thinking_budget=False
    )
