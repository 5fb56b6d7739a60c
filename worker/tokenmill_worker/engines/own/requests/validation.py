"""Turns a request into sequences, or refuses it with a reason.

The scheduler checks whether it can ever fit the cache.
"""

from __future__ import annotations

import secrets

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.requests import SEED_MASK, GenerationRequest, choice_seed
from tokenmill_worker.engines.limits import ModelLimits
from tokenmill_worker.engines.own.sequence import BULK, Sequence

# Of a request's choices, so many have its class. The others run as bulk work: they would take every
# row of the batch, and an interactive request would wait for one of them to end.
CHOICES_OF_CLASS = 4


class RequestValidator(ModelLimits):
    """Validates requests for one model."""

    def validate(self, request: GenerationRequest) -> list[Sequence]:
        """Return one sequence per choice that is not done.

        Raises RequestError, with one sentence that names the problem, if the request is refused.
        """
        limit = self.check(request)
        params = request.params.with_defaults(self.defaults)
        seed = secrets.randbits(63) if params.seed is None else params.seed & SEED_MASK
        return [
            self._sequence(request, params, choice, limit, seed)
            for choice in range(params.n)
            if choice not in request.done
        ]

    def _sequence(
        self, request: GenerationRequest, params: SamplingParams, choice: int, limit: int, seed: int
    ) -> Sequence:
        resumed = request.resumed[choice] if choice < len(request.resumed) else ()
        given = request.given[choice] if request.given else ()
        length = len(request.prompt)
        wants_prompt = choice == 0 and not given and params.prompt_logprobs is not None
        return Sequence(
            request_id=request.request_id,
            token_ids=[*request.prompt.token_ids, *(given or resumed)],
            num_prompt_tokens=length,
            media=request.prompt.media,
            params=params,
            choice=choice,
            num_resumed_tokens=len(resumed),
            seed=choice_seed(seed, choice),
            priority=request.priority if choice < CHOICES_OF_CLASS else max(request.priority, BULK),
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            thoughts=request.thoughts,
            deadline=request.deadline,
            max_tokens=len(given) or limit,
            next_scored=length + len(resumed) if given else 1,
            scored_end=length + len(given) if given else length if wants_prompt else 0,
        )
