"""Transformers on the same files: its continuous batching, and `generate` on padded batches."""

import logging
import os
import time
from typing import Any

import torch

from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine, Round
from ops.benchmarks.measure.workloads import WorkloadRequest

PAGE_SIZE = 32
PAD = 0


class TransformersEngine(MeasuredEngine):
    kind: str

    def __init__(self, options: EngineOptions) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoModelForCausalLM, __version__

        from tokenmill_worker.engines.own.execution.build import pick_device
        from tokenmill_worker.engines.own.model.model_files import resolve

        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._options = options
        model: Any = AutoModelForCausalLM.from_pretrained(
            resolve(options.model), dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        )
        device = pick_device(str(options.settings.get("device", "auto"))).torch_device
        self._model: Any = model.to(device)
        self.description = f"Transformers {__version__}, {self.kind}, sdpa"


class TransformersBatching(TransformersEngine):
    """Its own continuous batching, through its public manager.

    Each round has a fresh manager, so that it finds no prefix of an earlier round; creating and
    ending the manager is not timed.
    """

    kind = f"continuous batching, page_size={PAGE_SIZE}"

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        from transformers import ContinuousBatchingConfig

        self._model.generation_config.do_sample = False
        self._model.generation_config.eos_token_id = -1  # means: none
        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=self._options.pool_tokens // PAGE_SIZE,
            max_batch_tokens=self._options.max_batch_tokens,
        )
        with self._model.continuous_batching_context_manager(
            continuous_batching_config=config
        ) as manager:
            # one token, so that the pool is allocated before the clock starts
            manager.add_request([100, 101], request_id="warm", max_new_tokens=1, eos_token_id=-1)
            self._finished(manager, 1)
            started = time.perf_counter()
            # its add_requests takes one max_new_tokens for all; the order is its own
            ordered = sorted(enumerate(requests), key=lambda each: each[1].prompt, reverse=True)
            for index, request in ordered:
                manager.add_request(
                    list(request.prompt), request_id=str(index), record_timestamps=True,
                    max_new_tokens=request.max_tokens, eos_token_id=-1,
                )  # fmt: skip
            finished = self._finished(manager, len(requests))
            wall_s = time.perf_counter() - started
        results = [finished[str(index)] for index in range(len(requests))]
        return Round(
            wall_s=wall_s,
            tokens=[list(result.generated_tokens) for result in results],
            first_s=[result.timestamps[0] - started for result in results],
        )

    def _finished(self, manager: Any, count: int) -> dict[str, Any]:
        """Wait for so many results; raises RuntimeError if one failed."""
        finished: dict[str, Any] = {}
        while len(finished) < count:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its generation thread ended")
            elif result.error:
                raise RuntimeError(result.error)
            elif result.is_finished():
                finished[result.request_id] = result
        return finished


class StaticBatching(TransformersEngine):
    """`generate` on padded batches, one after the other.

    A batch has `max_sequences` requests in order of arrival and runs until its longest answer is
    complete.
    """

    kind = "generate on padded batches"

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        done, size = Round(0.0, [], []), self._options.max_sequences
        started = time.perf_counter()
        for first in range(0, len(requests), size):
            self._run_batch(requests[first : first + size], started, done)
        done.wall_s = time.perf_counter() - started
        return done

    def _run_batch(
        self, requests: tuple[WorkloadRequest, ...], started: float, done: Round
    ) -> None:
        longest = max(len(request.prompt) for request in requests)
        most = max(request.max_tokens for request in requests)
        ids = torch.full((len(requests), longest), PAD)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        step_ends: list[float] = []

        def note(input_ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
            step_ends.append(time.perf_counter() - started)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=most, do_sample=False, eos_token_id=None,
                pad_token_id=PAD, stopping_criteria=[note],
            )  # fmt: skip
        answers = output[:, longest:].tolist()
        for request, answer in zip(requests, answers, strict=True):
            done.tokens.append(answer[: request.max_tokens])
            done.first_s.append(step_ends[0])
        done.batch_sizes += [sum(r.max_tokens > step for r in requests) for step in range(most)]
