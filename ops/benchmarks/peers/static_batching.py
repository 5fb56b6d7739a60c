"""Static batching: Transformers' `generate` on padded batches, one batch after the other.

A batch has `max_sequences` requests in order of arrival and runs until its longest answer is
complete.
"""

import time
from typing import Any

from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine, Round, serve
from ops.benchmarks.measure.workload_files import WorkloadRequest
from ops.benchmarks.peers.transformers_batching import load_model

PAD = 0


class StaticBatching(MeasuredEngine):
    def __init__(self, options: EngineOptions) -> None:
        import torch
        from transformers import __version__

        if options.threads:
            torch.set_num_threads(options.threads)
        self._size = options.max_sequences
        self._model: Any = load_model(options)
        self.description = (
            f"Transformers {__version__}, generate on padded batches of {self._size}, sdpa"
        )

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        done = Round(0.0, [], [])
        started = time.perf_counter()
        for first in range(0, len(requests), self._size):
            self._run_batch(requests[first : first + self._size], started, done)
        done.wall_s = time.perf_counter() - started
        return done

    def _run_batch(
        self, requests: tuple[WorkloadRequest, ...], started: float, done: Round
    ) -> None:
        import torch

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
                ids,
                attention_mask=mask,
                max_new_tokens=most,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=PAD,
                stopping_criteria=[note],
            )
        answers = output[:, longest:].tolist()
        for request, answer in zip(requests, answers, strict=True):
            done.tokens.append(answer[: request.max_tokens])
            done.first_s.append(step_ends[0])
        done.batch_sizes += [sum(r.max_tokens > step for r in requests) for step in range(most)]


if __name__ == "__main__":
    serve(StaticBatching)
