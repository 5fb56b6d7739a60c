"""Checks requests against a model's limits, for every engine.

No accepted request can break a step: lengths, ids and parameters are checked before one is started.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tokenmill_schemas.generation import NO_DEFAULTS, SamplingParams
from tokenmill_schemas.params_validation import value_problems
from tokenmill_worker.contract.requests import GenerationRequest, RequestError, answer_limit


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Checks requests for one model."""

    vocab_size: int
    max_model_len: int
    can_structure: bool = True
    defaults: SamplingParams = NO_DEFAULTS  # of requests that name none
    adapters: Collection[str] = ()  # that requests may name

    def check(self, request: GenerationRequest) -> int:
        """Return how many tokens a choice may have.

        Raises RequestError, with one sentence that names the problem, if the request is refused.
        """
        self._check_prompt(request)
        self._check_params(request.params)
        self._check_thoughts(request)
        if set(request.done).issuperset(range(request.params.n)):
            raise RequestError("every choice of it is done")
        self._check_given(request)
        length, params = len(request.prompt), request.params
        limit = self.max_model_len - length
        if not request.given:
            limit = answer_limit(params, length, self.max_model_len, self.defaults.max_tokens)
        self._check_resumed(request, limit)
        return limit

    def _check_given(self, request: GenerationRequest) -> None:
        given = request.given
        if given and (len(given) != request.params.n or not all(given)):
            raise RequestError(f"given must hold the tokens of each of {request.params.n} choices")
        for ids in given:
            self._check_ids(ids, "given")
            total = len(request.prompt) + len(ids)
            if total >= self.max_model_len:
                raise RequestError(
                    f"{len(request.prompt)} prompt tokens and {len(ids)} given ones make "
                    f"{total}; the model's length is {self.max_model_len}, less one",
                    code="context_length_exceeded",
                )

    def _check_resumed(self, request: GenerationRequest, limit: int) -> None:
        for choice, resumed in request.open_choices():
            self._check_ids(resumed, "resumed")
            given = request.given[choice] if request.given else ()
            if given and resumed != given[: len(resumed)]:
                raise RequestError(f"choice {choice} resumes with other tokens than it was given")
            if not given and len(resumed) >= limit:
                raise RequestError(
                    f"choice {choice} resumes with {len(resumed)} tokens, its limit is {limit}"
                )

    def _check_prompt(self, request: GenerationRequest) -> None:
        if not len(request.prompt):
            raise RequestError("the prompt is empty; it needs at least one token")
        if request.prompt.media:
            raise RequestError(
                f"the prompt has a medium ({request.prompt.media[0].kind}); this engine reads text"
            )
        self._check_ids(request.prompt.token_ids, "prompt")
        if len(request.prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens; the model's length is "
                f"{self.max_model_len}, and at least one token is generated",
                code="context_length_exceeded",
            )

    def _check_ids(self, ids: Iterable[int], what: str) -> None:
        lowest, highest = min(ids, default=0), max(ids, default=0)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(
                f"{what} token id {wrong} is outside the vocabulary of {self.vocab_size} ids"
            )

    def _check_thoughts(self, request: GenerationRequest) -> None:
        thoughts = request.thoughts
        if thoughts is None:
            return
        start = () if thoughts.start is None else (thoughts.start,)
        self._check_ids((*thoughts.end, *thoughts.closing, *start), "thoughts")
        if not self.can_structure:
            raise RequestError(
                "thinking_budget is not available: the engine has no grammar compiler for this "
                "model"
            )

    def _check_params(self, params: SamplingParams) -> None:
        problems = value_problems(params)
        for what, ids in params.named_ids.items():
            if wrong := next((i for i in ids if i >= self.vocab_size), 0):
                problems.append(
                    f"{what} has id {wrong}, outside the vocabulary of {self.vocab_size} ids"
                )
        if params.lora and params.lora not in self.adapters:
            known = ", ".join(sorted(self.adapters))
            there = f"there are {known}" if known else "there are none"
            problems.append(f"adapter {params.lora!r} is not served here; {there}")
        if params.response_format is not None and not self.can_structure:
            problems.append(
                "response_format is not available: "
                "the engine has no grammar compiler for this model"
            )
        if problems:
            raise RequestError("; ".join(problems))
