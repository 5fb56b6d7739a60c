"""vLLM on the same files, stepped through its engine object, in its own environment.

Imports only the standard library and vLLM. `model` is a folder, because only our own packages can
resolve model names; the parent does so.
"""

import os
import time

from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine, Round, serve
from ops.benchmarks.measure.workload_files import WorkloadRequest


class Vllm(MeasuredEngine):
    def __init__(self, options: EngineOptions) -> None:
        threads = options.threads or os.cpu_count() or 1
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        from vllm import LLM, __version__  # type: ignore[import-not-found,unused-ignore]

        self._llm = LLM(
            model=options.model,
            dtype=options.dtype,
            enforce_eager=True,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            max_num_seqs=options.max_sequences,
            max_num_batched_tokens=options.max_batch_tokens,
            max_model_len=2048,
            disable_log_stats=True,
        )
        self.description = f"vLLM {__version__} CPU, eager, prefix caching on"

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

        # otherwise a later round finds the prompts of an earlier one
        self._llm.reset_prefix_cache()
        engine = self._llm.llm_engine
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(requests))}
        first: dict[str, float] = {}
        started = time.perf_counter()
        for index, request in enumerate(requests):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(index), {"prompt_token_ids": list(request.prompt)}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                tokens[output.request_id] += output.outputs[0].token_ids
                first.setdefault(output.request_id, now)
        return Round(
            wall_s=time.perf_counter() - started,
            tokens=list(tokens.values()),
            first_s=[first[name] for name in tokens],
        )


if __name__ == "__main__":
    serve(Vllm)
