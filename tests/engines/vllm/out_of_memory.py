"""A plugin of vLLM's, for a test: a step that begins a prompt with one token lacks memory."""

from __future__ import annotations

from typing import Any

TOKEN = 4_242
WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB"


def install() -> None:
    import torch  # vLLM's environment alone has the rest
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.execute_model

    def execute_model(self: Any, scheduled: Any, *others: Any, **named: Any) -> Any:
        if any(TOKEN in new.prompt_token_ids for new in scheduled.scheduled_new_reqs):
            raise torch.OutOfMemoryError(WORDS)
        return original(self, scheduled, *others, **named)

    GPUModelRunner.execute_model = execute_model
