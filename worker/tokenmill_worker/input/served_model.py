"""Describes the model that a queue serves, and completes the sampling parameters of requests by its
defaults and limits: nothing is left unnamed but a seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import LOGPROBS_MODES, NO_DEFAULTS, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.contract.requests import RequestError, answer_limit
from tokenmill_worker.input.outcomes import NOT_FOUND, TOO_LONG, Refused

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
        own = self.names[0]
        others = {name: own for name in self.names if name != own}
        return others | dict(self.aliases)

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


# of one job: they travel in one chunk, which the buffer of a subscriber's connection must take.
# With tokens of 6 bytes each has up to 30 bytes: less than the 4 MB of ops/deploy/redis/redis.conf
MAX_PROMPT_LOGPROBS: Final = 131_072


class ParamResolver:
    """Completes the parameters of requests by the defaults and the length of one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def resolve(
        self,
        request: JobRequest,
        chunks: list[Chunk],
        num_prompt_tokens: int,
        given: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """Return the complete parameters of a job that goes to the engine.

        Args:
            chunks: what the job's log holds.
            given: the tokens of its continuations.

        Raises:
            Refused: prompt and answer together exceed the model's length, or the prompt has too
                many log-probabilities.
        """
        defaults = self._defaults(chunks)
        most = (
            max(map(len, given))
            if given
            else self._max_tokens(request.params, num_prompt_tokens, defaults.max_tokens)
        )
        params = _completed(request, defaults, most)
        _check_scores(params, num_prompt_tokens)
        return params

    def resolve_logged(self, request: JobRequest, chunks: list[Chunk]) -> SamplingParams:
        """Return the parameters by which a logged answer is read; its length is not checked."""
        defaults = self._defaults(chunks)
        most = request.params.max_tokens or defaults.max_tokens
        return _completed(request, defaults, most)

    def _defaults(self, chunks: list[Chunk]) -> SamplingParams:
        """Return what holds where a request names nothing.

        An answer that has begun keeps the parameters of its first worker, whose model may have
        other defaults. A log without parameters was begun by a worker that knew no such defaults.
        """
        limit = self._model.default_max_tokens
        if chunks:
            return chunks[0].params or SamplingParams(max_tokens=limit)
        defaults = self._model.sampling_defaults
        return defaults if limit is None else msgspec.structs.replace(defaults, max_tokens=limit)

    def _max_tokens(self, params: SamplingParams, num_prompt: int, default: int | None) -> int:
        try:
            return answer_limit(params, num_prompt, self._model.max_model_len, default)
        except RequestError as error:
            raise Refused(str(error), TOO_LONG) from error


def _check_scores(params: SamplingParams, num_prompt_tokens: int) -> None:
    if params.prompt_logprobs is None:
        return
    count = num_prompt_tokens * (1 + params.prompt_logprobs)
    if count > MAX_PROMPT_LOGPROBS:
        raise Refused(
            f"{num_prompt_tokens} prompt tokens with prompt_logprobs={params.prompt_logprobs} have "
            f"{count} log-probabilities; the limit is {MAX_PROMPT_LOGPROBS}"
        )


def _completed(
    request: JobRequest, defaults: SamplingParams, max_tokens: int | None
) -> SamplingParams:
    """Return the request's parameters with nothing left unnamed but the seed, which may follow from
    the job's id. Continuations are the choices of an answer with log-probabilities.
    """
    params = msgspec.structs.replace(request.params.with_defaults(defaults), max_tokens=max_tokens)
    if params.echo and params.wants_logprobs and params.prompt_logprobs is None:
        params = msgspec.structs.replace(params, prompt_logprobs=params.num_top_logprobs)
    if not request.continuations:
        return params
    return msgspec.structs.replace(
        params,
        n=len(request.continuations),
        logprobs=params.logprobs if params.wants_logprobs else True,
        logprobs_mode=LOGPROBS_MODES[0],
        ignore_eos=True,
    )


def seed_of(job_id: str) -> int:
    """Return the seed of a job that names none. It is the same at every delivery, so that a resumed
    answer continues as it would have.
    """
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "big") >> 1
