"""Limits on prefills, as vLLM means them: how much of a prompt one step computes, and how many
prompts are computed in parts at once. Without any setting there are none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

_LONG_SHARE: Final = 0.04  # of the context: long, where several prompts are computed in parts


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """The settings with their defaults resolved. 0 means no limit."""

    is_chunked: bool  # else a prompt is started only if the step takes all of it
    threshold: int  # more tokens to compute are long; also the most of one sequence in a step
    partial: int  # prompts that are computed in parts at once
    long: int  # long ones among these

    @classmethod
    def of(
        cls, is_chunked: bool, threshold: int, partial: int | None, long: int | None
    ) -> PrefillLimits:
        """Resolve None: vLLM's 1 beside the limit of the other count, else no limit."""
        default = int(bool(partial or long))
        return cls(
            is_chunked,
            threshold,
            default if partial is None else partial,
            default if long is None else long,
        )

    def for_length(self, max_model_len: int) -> PrefillLimits:
        """Return the limits of a model; where several prompts may be computed in parts and no
        threshold is set, it follows from the model's length.
        """
        if self.threshold or self.partial < 2:
            return self
        return dataclasses.replace(self, threshold=max(1, int(max_model_len * _LONG_SHARE)))

    def problems(self) -> list[str]:
        """Return one sentence for each setting that contradicts another."""
        found = []
        has_long = self.threshold or self.partial > 1
        if has_long and self.long > self.partial > 0:
            found.append(
                f"max_long_partial_prefills ({self.long}) must not exceed "
                f"max_num_partial_prefills ({self.partial})"
            )
        if not self.is_chunked and (self.threshold or self.partial or self.long):
            found.append("enable_chunked_prefill cannot be off beside limits on partial prefills")
        return found

    def length_problems(self, max_model_len: int, max_num_batched_tokens: int) -> list[str]:
        """Return one sentence for each setting that does not fit the longest sequence."""
        found = []
        if self.threshold > max_model_len:
            found.append(
                f"long_prefill_token_threshold ({self.threshold}) exceeds the model's length of "
                f"{max_model_len}: nothing is long"
            )
        if not self.is_chunked and max_num_batched_tokens < max_model_len:
            found.append(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least the model's "
                f"length of {max_model_len} without enable_chunked_prefill"
            )
        return found
