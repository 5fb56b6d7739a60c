"""Calls for direct use of the engine: add requests, stream or take their results, generate a batch.

The calls have the names of Transformers' continuous-batching manager where the meaning is the same.
They step the engine themselves, in the caller's thread.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, Self

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.prompt import Prompt
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engines.own.errors import EngineError
from tokenmill_worker.engines.own.requests.tracker import RequestTracker
from tokenmill_worker.engines.own.types import GenerationOutput


class DirectCalls(ABC):
    """The part of the engine that collects results for a caller in the same thread."""

    def __init__(self, requests: RequestTracker) -> None:
        self._requests = requests
        self._outputs = requests.outputs
        self._ids = itertools.count()

    @property
    @abstractmethod
    def has_work(self) -> bool: ...

    @property
    @abstractmethod
    def waits_only(self) -> bool: ...

    @abstractmethod
    def step(self) -> list[TokenEvent]: ...

    @abstractmethod
    def stop(self, drain: bool = True) -> None: ...

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
        """Add one request whose result `stream` or `get_result` returns.

        `fields` are other fields of GenerationRequest. Raises RequestError if the request is
        refused.
        """
        return self.add_requests(
            [prompt_ids], [params or SamplingParams()], [request_id], **fields
        )[0]

    def add_requests(
        self,
        prompts: Seq[Seq[int]],
        params: Seq[SamplingParams] | SamplingParams | None = None,
        request_ids: Seq[str | None] | None = None,
        **fields: Any,
    ) -> list[str]:
        """Add requests together, ordered for prefix hits; return their ids in the given order.

        Raises RequestError, and adds none, if one of them is refused.
        """
        shared = params if isinstance(params, SamplingParams) else SamplingParams()
        each = (
            [shared] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        ids = list(request_ids) if request_ids is not None else [None] * len(prompts)
        if not len(prompts) == len(each) == len(ids):
            raise ValueError(
                f"{len(prompts)} prompts, {len(each)} sampling parameters and "
                f"{len(ids)} ids do not match"
            )
        requests = [
            GenerationRequest(
                request_id=name or self._new_id(),
                prompt=Prompt(tuple(prompt)),
                params=sampling,
                **fields,
            )
            for prompt, sampling, name in zip(prompts, each, ids, strict=True)
        ]
        self._requests.add(requests)
        return [request.request_id for request in requests]

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def stream(self, request_id: str) -> Iterator[TokenEvent]:
        """Yield the request's events, stepping the engine meanwhile, until its last choice ends.

        Tokens that came before the call are one event per choice.
        """
        cursors: dict[int, int] = {}
        while True:
            yield from self._outputs.read(request_id, cursors)
            if self._outputs.is_finished(request_id):
                self._outputs.discard(request_id)
                return
            self._step_or_wait()

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Step until this request (None: any request) is finished and return it.

        Return None after `timeout` seconds, or when no work is left.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (found := self._outputs.take(request_id)) is None:
            if (deadline is not None and time.monotonic() >= deadline) or not self.has_work:
                return None
            self._step_or_wait()
        return found

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield finished requests in the order of their ends, until no work is left."""
        while (found := self.get_result()) is not None:
            yield found

    def generate_batch(
        self, prompts: Seq[Seq[int]], params: Seq[SamplingParams] | SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """Continue every prompt and return the outputs in prompt order.

        Raises RequestError if one of them is refused.
        """
        request_ids = self.add_requests(prompts, params)
        outputs = []
        for request_id in request_ids:
            output = self.get_result(request_id)
            if output is None:
                raise EngineError(f"request {request_id} came to no end")
            outputs.append(output)
        return outputs

    def _step_or_wait(self) -> None:
        if not self.step() and self.waits_only:
            time.sleep(0.001)
