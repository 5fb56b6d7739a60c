"""Loads the runner of the configured model, and builds the scheduler that fits it.

Heavy runners are imported on demand.
"""

from __future__ import annotations

import logging

from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.execution.interface import Runner, RunnerHooks, RunnerInfo
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.types import ProgressCallback

log = logging.getLogger(__name__)


def load_runner(
    config: EngineConfig, cache_dir: str | None = None, on_progress: ProgressCallback | None = None
) -> Runner:
    """Load the runner for the configured model.

    Raises EngineConfigError, or OSError if the model is not found.
    """
    from tokenmill_worker.engines.own.execution.build import load_model_runner

    return load_model_runner(config, cache_dir, on_progress)


def build_scheduler(info: RunnerInfo, hooks: RunnerHooks) -> Scheduler:
    """Build a scheduler for a loaded runner.

    Raises:
        EngineConfigError: the settings do not fit the model.
    """
    config = info.config
    scheduler = Scheduler(
        config,
        info.cache_config,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        proposer=hooks.propose,
        has_state=hooks.has_state,
        disk=hooks.disk,
        async_depth=1 if info.is_asynchronous else 0,
    )
    longest = scheduler.max_model_len
    if longest < info.max_model_len:
        log.info(
            "The longest sequence has %d tokens, not %d: "
            "the cache, of %d blocks, holds no longer one. "
            "Raise max_memory_percent or max_memory_gib for a larger cache",
            longest, info.max_model_len, info.cache_config.num_usable,
        )  # fmt: skip
    found = config.prefill_limits.length_problems(longest, config.max_num_batched_tokens)
    if found:
        raise EngineConfigError(found)
    return scheduler
