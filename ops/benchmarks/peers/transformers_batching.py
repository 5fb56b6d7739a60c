"""Transformers' own continuous batching on the same files, through its public manager.

Runs as a child process of the benchmark. Each round has a fresh manager, so that it finds no prefix
of an earlier round; creating and ending the manager is not timed.
"""

import logging
import os
import time
from typing import Any

from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine, Round, serve
from ops.benchmarks.measure.workload_files import WorkloadRequest

PAGE_SIZE = 32


class TransformersBatching(MeasuredEngine):
    def __init__(self, options: EngineOptions) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        from transformers import __version__

        if options.threads:
            torch.set_num_threads(options.threads)
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._options = options
        self._model: Any = load_model(options)
        self._model.generation_config.do_sample = False
        self._model.generation_config.eos_token_id = -1  # means: none
        self.description = (
            f"Transformers {__version__} continuous batching, sdpa, page_size={PAGE_SIZE}"
        )

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        from transformers import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=self._options.pool_tokens // PAGE_SIZE,
            max_batch_tokens=self._options.max_batch_tokens,
        )
        finished: dict[int, Any] = {}
        with self._model.continuous_batching_context_manager(
            continuous_batching_config=config
        ) as manager:
            self._wake(manager)
            started = time.perf_counter()
            # its add_requests takes one max_new_tokens for all; the order is its own
            ordered = sorted(enumerate(requests), key=lambda each: each[1].prompt, reverse=True)
            for index, request in ordered:
                manager.add_request(
                    list(request.prompt),
                    request_id=str(index),
                    max_new_tokens=request.max_tokens,
                    record_timestamps=True,
                    eos_token_id=-1,
                )
            while len(finished) < len(requests):
                result = self._next(manager)
                if result is not None and result.is_finished():
                    finished[int(result.request_id)] = result
            wall_s = time.perf_counter() - started
        failed = [result.error for result in finished.values() if result.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        results = [finished[index] for index in range(len(requests))]
        return Round(
            wall_s=wall_s,
            tokens=[list(result.generated_tokens) for result in results],
            first_s=[result.timestamps[0] - started for result in results],
        )

    def _wake(self, manager: Any) -> None:
        """Run one token, so that the pool is allocated before the clock starts."""
        manager.add_request([100, 101], request_id="warm", max_new_tokens=1, eos_token_id=-1)
        while (result := self._next(manager)) is None or not result.is_finished():
            pass

    def _next(self, manager: Any) -> Any:
        """Return the next result, or None if none came within a second."""
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("its generation thread ended")
        return result


def load_model(options: EngineOptions) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from tokenmill_worker.engines.own.execution.build import pick_device
    from tokenmill_worker.engines.own.model.model_files import resolve

    model: Any = AutoModelForCausalLM.from_pretrained(
        resolve(options.model), dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    )
    return model.to(pick_device(str(options.settings.get("device", "auto"))).torch_device)


if __name__ == "__main__":
    serve(TransformersBatching)
