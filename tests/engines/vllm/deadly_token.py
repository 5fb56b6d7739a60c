"""A plugin of vLLM's, for a test: a step that begins a prompt with one token kills its core."""

from __future__ import annotations

import os
import signal
from typing import Any

WORD, TOKEN = " arsenic", 22_146  # of SmolLM2's tokenizer


def install() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # vLLM's environment alone has it

    original = GPUModelRunner.execute_model

    def execute_model(self: Any, scheduled: Any, *others: Any, **named: Any) -> Any:
        if any(TOKEN in new.prompt_token_ids for new in scheduled.scheduled_new_reqs):
            os.kill(os.getppid(), signal.SIGKILL)  # the engine core, whose device worker this is
        return original(self, scheduled, *others, **named)

    GPUModelRunner.execute_model = execute_model
