"""Describes the model that a queue serves: its names, adapters, limits and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenmill_schemas.generation import NO_DEFAULTS, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.input.refusal import NOT_FOUND, Refused

MAX_LISTED = 10  # names that an error message lists


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Describes the served model, as far as requests depend on it.

    `names` are the names that a request may use for the model; the first is the model's own.
    `sampling_defaults` are the model's own, for requests that name none.
    `default_max_tokens` limits the answers of requests that set no limit; with None, such an answer
    may take the rest of the model's length. A request selects one of `adapters` by `lora`, or as
    its model. `aliases` are further names for the adapters and the model. `eos_token_ids` are those
    at which the engine ends an answer by itself; `tokenizer_eos` may name more. `special_tokens`:
    the ids of tokens that have no text in an answer, by their letters.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_max_tokens: int | None = None
    sampling_defaults: SamplingParams = NO_DEFAULTS
    adapters: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    tokenizer_eos: frozenset[int] = frozenset()
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    capabilities: Capabilities | None = None  # of its engine; None: every one

    def stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the ids at which the engine ends an answer beside its own: those that the request
        names, the special tokens among its stop strings, which no text would show, and the
        tokenizer's end of turn, which some models' files forget.
        """
        also = {self.special_tokens[text] for text in params.stop if text in self.special_tokens}
        if not params.ignore_eos:
            also |= self.tokenizer_eos - self.eos_token_ids
        known = {token_id for token_id in also if token_id < self.vocab_size}
        return tuple(sorted({*params.stop_token_ids, *known}))

    @property
    def further_names(self) -> dict[str, str]:
        """Each alias with the name of the model or adapter that it stands for."""
        return dict.fromkeys(self.names[1:], self.names[0]) | dict(self.aliases)

    def adapter_for(self, model: str, lora: str) -> str:
        """Return the name of the adapter that answers; empty for the model itself. Raises
        Refused for names that are not served or contradict each other.
        """
        target = self.aliases.get(model, model)
        if target and target not in self.names and target not in self.adapters:
            others = sorted({*self.adapters, *self.aliases})
            also = (
                f" (and as adapters or aliases: {', '.join(others[:MAX_LISTED])})" if others else ""
            )
            raise Refused(
                f"model {model!r} is not served here; this queue serves {self.names[0]!r}{also}",
                NOT_FOUND,
            )
        chosen = target if target in self.adapters else ""
        wanted = self.aliases.get(lora, lora)
        if wanted and wanted not in self.adapters:
            there = ", ".join(sorted(self.adapters)[:MAX_LISTED]) or "none"
            raise Refused(
                f"lora {lora!r} is not served here; this queue's adapters: {there}", NOT_FOUND
            )
        if chosen and wanted and chosen != wanted:
            raise Refused(
                f"model {model!r} is the adapter {chosen!r}, but lora asks for {wanted!r}",
                NOT_FOUND,
            )
        return chosen or wanted

    def check_capabilities(self, request: JobRequest) -> None:
        """Raise Refused if the request asks for what the engine does not have."""
        if self.capabilities is not None:
            found = self.capabilities.problems(
                request.params,
                calls_tools=bool(request.tools) and request.tool_choice != "none",
                scores=bool(request.continuations),
            )
            if found:
                raise Refused("; ".join(found))

    def check_ids(self, request: JobRequest) -> None:
        """Raise Refused if the request has token ids outside the model's vocabulary."""
        for name, ids in (
            ("prompt_ids", request.prompt_ids or ()),
            *request.params.named_ids.items(),
            *(("continuations", one) for one in request.continuations if not isinstance(one, str)),
        ):
            if max(ids, default=0) >= self.vocab_size:
                raise Refused(
                    f"{name} holds {max(ids)}, outside the vocabulary of {self.vocab_size} ids"
                )
