"""llama.cpp's server on the model's own GGUF file, over HTTP, in an environment of its own.

Imports only the standard library and xllamacpp. A place of the server is called a slot; prompts are
not kept in slots, because a later round would find those of an earlier one.
"""

import json
import os
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine, Round, serve
from ops.benchmarks.measure.workload_files import WorkloadRequest

SLOTS, SLOT_TOKENS = 32, 2_048  # one cache for all slots would make every step read all of it


class LlamaCpp(MeasuredEngine):
    def __init__(self, options: EngineOptions) -> None:
        import xllamacpp  # type: ignore[import-not-found,unused-ignore]

        threads, slots = options.threads or os.cpu_count() or 1, min(SLOTS, options.max_sequences)
        params = xllamacpp.CommonParams()
        params.model.path = options.model
        params.n_parallel, params.n_ctx = slots, slots * SLOT_TOKENS
        params.n_batch = params.n_ubatch = options.max_batch_tokens
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.port, params.verbosity, params.cache_ram_mib = 0, 0, 0
        self._server = xllamacpp.Server(params)
        self.description = (
            f"llama.cpp (xllamacpp {xllamacpp.__version__}), {slots} slots, {threads} threads, "
            f"{os.path.basename(options.model)}"  # noqa: PTH119
        )

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(self._ask, requests))
        wall_s = time.perf_counter() - started
        return Round(
            wall_s=wall_s,
            tokens=[tokens for tokens, _, _ in answers],
            first_s=[ended - generating_s - started for _, ended, generating_s in answers],
        )

    def _ask(self, request: WorkloadRequest) -> tuple[list[int], float, float]:
        """Return the tokens, the time of the answer, and the seconds since its first token."""
        body: dict[str, Any] = {
            "prompt": list(request.prompt),
            "n_predict": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": False,
        }
        call = urllib.request.Request(
            f"{self._server.listening_address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(call) as reply:
            answer = json.load(reply)
        ended, timings = time.perf_counter(), answer["timings"]
        if timings["predicted_n"] != request.max_tokens:
            raise RuntimeError(f"{timings['predicted_n']} tokens of {request.max_tokens}")
        return answer["tokens"], ended, 1e-3 * timings["predicted_ms"]


if __name__ == "__main__":
    serve(LlamaCpp)
