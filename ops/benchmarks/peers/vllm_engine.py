"""vLLM's AsyncLLM on the same files, a task for each request, in vLLM's own environment.

Imports only the standard library and vLLM. `model` is a folder, because only our own packages can
resolve model names; the parent does so.
"""

import asyncio
import time
from typing import Any

from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine, Round
from ops.benchmarks.measure.workloads import WorkloadRequest

LENGTH = 2048  # of a prompt and its answer


class Vllm(MeasuredEngine):
    def __init__(self, options: EngineOptions) -> None:
        from vllm import AsyncEngineArgs, __version__  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found,unused-ignore]

        self._loop, self._rounds = asyncio.Runner(), 0
        self._loop.get_loop()  # the engine's tasks run in it
        args = AsyncEngineArgs(
            model=options.model, dtype=options.dtype, max_num_seqs=options.max_sequences,
            max_num_batched_tokens=options.max_batch_tokens, max_model_len=LENGTH,
            enforce_eager=True, enable_prefix_caching=True, skip_tokenizer_init=True,
            disable_log_stats=True,
        )  # fmt: skip
        self._llm: Any = AsyncLLM.from_engine_args(args)
        self.description = f"vLLM {__version__} CPU, AsyncLLM, eager, prefix caching on"

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        self._rounds += 1
        return self._loop.run(self._run(requests))

    async def _run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        # otherwise a later round finds the prompts of an earlier one
        await self._llm.reset_prefix_cache()
        started = time.perf_counter()
        answers = await asyncio.gather(*map(self._answer, range(len(requests)), requests))
        wall_s = time.perf_counter() - started
        return Round(wall_s, [ids for ids, _ in answers], [first - started for _, first in answers])

    async def _answer(self, number: int, request: WorkloadRequest) -> tuple[list[int], float]:
        """Return the tokens of one request and the time of the first."""
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

        params = SamplingParams(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt, ids, first = {"prompt_token_ids": list(request.prompt)}, [], 0.0
        async for output in self._llm.generate(prompt, params, f"{self._rounds}-{number}"):
            ids += output.outputs[0].token_ids
            first = first or time.perf_counter()
        return ids, first

    def close(self) -> None:
        self._llm.shutdown(timeout=2)
        self._loop.close()
