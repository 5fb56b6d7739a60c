"""Describes the model that a queue serves: its names, adapters, limits and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenmill_schemas.generation import NO_DEFAULTS, SamplingParams

MAX_LISTED = 10  # names that an error message lists


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Describes the served model, as far as requests depend on it.

    `names` are the names that a request may use for the model; the first is the model's own.
    `sampling_defaults` are the model's own, for requests that name none.
    `default_max_tokens` limits the answers of requests that set no limit; with None, such an answer
    may take the rest of the model's length. A request selects one of `adapters` by `lora`, or as
    its model. `aliases` are further names for the adapters and the model.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_max_tokens: int | None = None
    sampling_defaults: SamplingParams = NO_DEFAULTS
    adapters: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def adapter_for(self, model: str, lora: str) -> str:
        """Return the name of the adapter that answers; empty for the model itself. Raises
        LookupError, with one sentence, for names that are not served or contradict each other.
        """
        target = self.aliases.get(model, model)
        if target and target not in self.names and target not in self.adapters:
            others = sorted({*self.adapters, *self.aliases})
            also = (
                f" (and as adapters or aliases: {', '.join(others[:MAX_LISTED])})" if others else ""
            )
            raise LookupError(
                f"model {model!r} is not served here; this queue serves {self.names[0]!r}{also}"
            )
        chosen = target if target in self.adapters else ""
        wanted = self.aliases.get(lora, lora)
        if wanted and wanted not in self.adapters:
            there = ", ".join(sorted(self.adapters)[:MAX_LISTED]) or "none"
            raise LookupError(f"lora {lora!r} is not served here; this queue's adapters: {there}")
        if chosen and wanted and chosen != wanted:
            raise LookupError(
                f"model {model!r} is the adapter {chosen!r}, but lora asks for {wanted!r}"
            )
        return chosen or wanted
