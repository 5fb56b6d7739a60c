"""Defines what the engine needs of a runner, chooses one, and builds the scheduler that fits it.

Heavy runners are imported on demand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenmill_schemas.generation import NO_DEFAULTS, SamplingParams
from tokenmill_worker.engine.config import EngineConfig, EngineConfigError
from tokenmill_worker.engine.config.cache import CacheConfig
from tokenmill_worker.engine.plan import Draft, StepOutput, StepPlan
from tokenmill_worker.engine.scheduler import Lookahead, Scheduler
from tokenmill_worker.engine.sequence import Sequence
from tokenmill_worker.engine.types import ProgressCallback

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Values of a loaded runner that do not change."""

    config: EngineConfig  # resolved: no value is "auto"
    cache_config: CacheConfig
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    model_path: Path  # the folder whose tokenizer belongs to the model
    description: str  # one line for the log
    can_structure: bool = False  # is response_format available?
    is_asynchronous: bool = False  # may a step be launched before the last one's tokens are known?
    proposer: Callable[[Sequence], Draft] | None = None  # drafts tokens; None: off
    # makes a draft model's drafts before a step is planned, for the proposer; None: there is none
    draft: Callable[[Lookahead], None] | None = None
    # whether recurrent states after the block with this hash are kept; None: there are none
    has_state: Callable[[bytes], bool] | None = None
    sampling_defaults: SamplingParams = NO_DEFAULTS  # of requests that name none
    # sequences, longest context and common prefix (or none) of the decodes to capture at the start
    graphed_decodes: tuple[tuple[int, int, bool], ...] = ()


class Runner(Protocol):
    """Executes plans on a device."""

    info: RunnerInfo

    def launch(self, plan: StepPlan) -> Any:
        """Start a step; pass the return value to `finish`.

        Steps are finished in the order of their launch.
        """
        ...

    def finish(self, step: Any) -> StepOutput: ...

    def prepare(self, params: SamplingParams, tenant: str = "") -> Future[Any] | None:
        """Start compiling a grammar if these parameters need one, in the turn of the tenant; return
        None if there is nothing to wait for.
        """
        ...

    def prepare_adapter(self, name: str) -> Future[str]:
        """Start loading a LoRA adapter; the future gives the key of the loaded version.

        A ValueError of the future is one sentence for the user.
        """
        ...

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Drop the state of sequences that finished or were preempted."""
        ...

    def is_alive(self) -> bool:
        """Return whether the device still works; called when a step has failed."""
        ...

    def close(self) -> None: ...


def load_runner(
    config: EngineConfig, cache_dir: str | None = None, on_progress: ProgressCallback | None = None
) -> Runner:
    """Load the runner for the configured model.

    Raises EngineConfigError, or OSError if the model is not found.
    """
    from tokenmill_worker.engine.execution.synthetic import SyntheticRunner, is_synthetic

    if is_synthetic(config.model):
        return SyntheticRunner.load(config, cache_dir, on_progress)
    if config.tensor_parallel:
        from tokenmill_worker.engine.execution.tensor_parallel import TensorParallelRunner

        return TensorParallelRunner.load(config, cache_dir, on_progress)
    from tokenmill_worker.engine.execution.build import load_model_runner

    return load_model_runner(config, cache_dir, on_progress)


def build_scheduler(info: RunnerInfo) -> Scheduler:
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
        proposer=info.proposer,
        has_state=info.has_state,
        async_depth=1 if info.is_asynchronous else 0,
    )
    longest = scheduler.max_model_len
    if longest < info.max_model_len:
        log.info(
            "The longest sequence has %d tokens, not %d: "
            "the %d blocks of num_blocks hold no longer one",
            longest, info.max_model_len, info.cache_config.num_blocks,
        )  # fmt: skip
    found = config.prefill_limits.length_problems(longest, config.max_num_batched_tokens)
    if found:
        raise EngineConfigError(found)
    return scheduler
