"""llama.cpp on the same files, through its low-level calls; a child process in its own environment.

Batches are built as its server does: the next token of every running sequence, then as much of the
waiting prompts as fits. Each sequence has its own key/value stream. Prefixes are not shared: its
server shares none between requests that run at once. Imports only the standard library, numpy and
llama_cpp.
"""

import ctypes
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.benchmarks.measure.protocol import EngineOptions, Round, serve
from ops.benchmarks.measure.workload_files import WorkloadRequest

_NO_FLASH = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED
_PADDING = 256  # llama.cpp rounds the cells of a stream up to it


@dataclass(slots=True)
class Running:
    """Running request in slot `slot`; `position` of its tokens are in the cache or in the batch."""

    index: int
    request: WorkloadRequest
    slot: int
    position: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.request.max_tokens


class LlamaCpp:
    def __init__(self, options: EngineOptions) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]

        self._api: Any = llama_cpp
        self._options = options
        self._quiet = llama_cpp.llama_log_callback(
            lambda *_: None
        )  # keep a reference: the library holds a bare pointer
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(options.model.encode(), params)
        if not self._model:
            raise OSError(f"llama.cpp cannot load {options.model}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._threads = options.threads or os.cpu_count() or 1
        kind = "float32 cache" if self._is_float else "float16 cache"
        self.description = (
            f"llama.cpp ({llama_cpp.__version__} of its Python package), {kind}, a "
            "stream per sequence"
        )

    @property
    def _is_float(self) -> bool:
        return self._options.dtype == "float32" and "quantization" not in self._options.settings

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        slots = min(len(requests), self._options.max_sequences)
        context = self._context(slots, longest)
        batch = self._api.llama_batch_init(self._options.max_batch_tokens, 0, 1)
        try:
            return self._serve(context, batch, requests, slots)
        finally:
            self._api.llama_batch_free(batch)
            self._api.llama_free(context)

    def _context(self, slots: int, longest: int) -> Any:
        """Create a context, untimed, for each round: none finds the keys of an earlier one."""
        params = self._api.llama_context_default_params()
        params.n_ctx = slots * (-(-longest // _PADDING) * _PADDING)
        params.n_seq_max = slots
        params.n_batch = params.n_ubatch = self._options.max_batch_tokens
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        params.no_perf = True
        if self._is_float:
            params.type_k = params.type_v = self._api.GGML_TYPE_F32
            # its flash attention rounds more: other tokens, not faster here
            params.flash_attn_type = _NO_FLASH
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp could not make a context")
        return context

    def _serve(
        self, context: Any, batch: Any, requests: tuple[WorkloadRequest, ...], slots: int
    ) -> Round:
        memory = self._api.llama_get_memory(context)
        waiting = deque(enumerate(requests))
        free = list(range(slots))
        running: list[Running] = []
        done: dict[int, Running] = {}
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        batch_sizes = []
        steps = computed = 0
        started = time.perf_counter()
        while waiting or running:
            while waiting and free:
                index, request = waiting.popleft()
                running.append(Running(index, request, free.pop()))
            rows = fill(batch, running, self._options.max_batch_tokens)
            code = self._api.llama_decode(context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode gave {code}")
            for row, sequence in rows:
                sequence.tokens.append(self._most_likely(context, row))
            now = time.perf_counter() - started
            for _, sequence in rows:
                first.setdefault(sequence.index, now)
                last[sequence.index] = now
                if sequence.is_done:
                    self._api.llama_memory_seq_rm(memory, sequence.slot, -1, -1)
                    free.append(sequence.slot)
                    done[sequence.index] = sequence
            running = [sequence for sequence in running if not sequence.is_done]
            steps, computed = steps + 1, computed + batch.n_tokens
            if rows:
                batch_sizes.append(len(rows))
        order = range(len(requests))
        return Round(
            wall_s=time.perf_counter() - started,
            tokens=[done[index].tokens for index in order],
            first_s=[first[index] for index in order],
            last_s=[last[index] for index in order],
            steps=steps,
            computed_tokens=computed,
            cached_tokens=0,
            batch_sizes=batch_sizes,
        )

    def _most_likely(self, context: Any, row: int) -> int:
        import numpy

        logits = self._api.llama_get_logits_ith(context, row)
        return int(numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def close(self) -> None:
        self._api.llama_model_free(self._model)
        self._api.llama_backend_free()


def fill(batch: Any, running: Sequence[Running], limit: int) -> list[tuple[int, Running]]:
    """Fill the batch: decodes first, then prompts in order of arrival.

    Returns the rows whose logits give a token, each with its sequence.
    """
    batch.n_tokens = 0
    rows = [
        (_add(batch, sequence, sequence.tokens[-1], wants_logits=True), sequence)
        for sequence in running
        if sequence.tokens
    ]
    for sequence in running:
        prompt = sequence.request.prompt
        room = limit - batch.n_tokens
        for token in (
            prompt[sequence.position : sequence.position + room] if not sequence.tokens else ()
        ):
            is_last = sequence.position + 1 == len(prompt)
            row = _add(batch, sequence, token, wants_logits=is_last)
            if is_last:
                rows.append((row, sequence))
    return rows


def _add(batch: Any, sequence: Running, token: int, *, wants_logits: bool) -> int:
    row = int(batch.n_tokens)
    batch.token[row] = token
    batch.pos[row] = sequence.position
    batch.n_seq_id[row] = 1
    batch.seq_id[row][0] = sequence.slot
    batch.logits[row] = wants_logits
    batch.n_tokens += 1
    sequence.position += 1
    return row


if __name__ == "__main__":
    serve(LlamaCpp)
