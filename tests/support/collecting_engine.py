"""An engine that keeps what its steps return, for measurements and tests in the caller's thread.

    with CollectingEngine.load(EngineConfig(model="smollm2-135m-instruct")) as engine:
        outputs = engine.generate_batch([[1, 2, 3]])

Products use `BatchedModel`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Self

from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import GenerationRequest, Prompt, RequestError
from tokenmill_worker.engines.own.engine import Engine

REFUSALS = ("invalid_request", "context_length_exceeded")


@dataclass(slots=True)
class CollectedOutput:
    """One choice of a request as far as it is generated; `choices` holds all, this one included."""

    request_id: str
    num_prompt_tokens: int
    choices: list[CollectedOutput]
    token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def add(self, event: TokenEvent) -> None:
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs += event.prompt_logprobs
        self.num_cached_tokens = self.num_cached_tokens or event.num_cached_tokens
        self.finish_reason, self.error = event.finish_reason, event.error
        if event.error_code in REFUSALS:
            raise RequestError(event.error or "", event.error_code or "")


class CollectingEngine(Engine):
    """The engine, with results by request id.

    A step raises RequestError if the engine refuses a request.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._ids = itertools.count()
        self._outputs: dict[str, CollectedOutput] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(drain=kind is None)

    def add_request(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **fields: Any,
    ) -> str:
        """Add one request and return its id; `fields` are other fields of GenerationRequest."""
        params, name = params or SamplingParams(), request_id or f"request-{next(self._ids)}"
        self._add([_request(name, prompt_ids, params, fields)])
        return name

    def add_requests(
        self, prompts: Seq[Seq[int]], params: Seq[SamplingParams] | SamplingParams
    ) -> list[str]:
        """Add requests together, so that shared prefixes hit the cache; return ids in order."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        requests = [
            _request(f"request-{next(self._ids)}", prompt, one, {})
            for prompt, one in zip(prompts, each, strict=True)
        ]
        self._add(requests)
        return [request.request_id for request in requests]

    def _add(self, requests: list[GenerationRequest]) -> None:
        for request in requests:
            choices: list[CollectedOutput] = []
            for _ in range(request.params.n):
                choices.append(CollectedOutput(request.request_id, len(request.prompt), choices))
            self._outputs[request.request_id] = choices[0]
        self.submit(requests)

    def step(self) -> list[TokenEvent]:
        return self._collect(super().step())

    def settle(self) -> list[TokenEvent]:
        return self._collect(super().settle())

    def _collect(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            if (output := self._outputs.get(event.request_id)) is not None:
                output.choices[event.choice].add(event)
        return events

    def result(self, request_id: str) -> CollectedOutput:
        """Step until the request is finished, and take its output."""
        output = self._outputs[request_id]
        while not output.is_finished:
            self.step()
        return self._outputs.pop(request_id)

    def generate_batch(
        self, prompts: Seq[Seq[int]], params: Seq[SamplingParams] | SamplingParams
    ) -> list[CollectedOutput]:
        """Continue every prompt and return the outputs in prompt order."""
        return [self.result(name) for name in self.add_requests(prompts, params)]


def _request(
    name: str, prompt_ids: Seq[int], params: SamplingParams, fields: Mapping[str, Any]
) -> GenerationRequest:
    prompt = Prompt(tuple(prompt_ids))
    return GenerationRequest(request_id=name, prompt=prompt, params=params, **fields)
