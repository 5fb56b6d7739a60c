"""Defines what the engine needs of a runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tokenmill_schemas.generation import NO_DEFAULTS, SamplingParams
from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.config.cache import CacheConfig
from tokenmill_worker.engines.own.kv.disk_tier import DiskTier
from tokenmill_worker.engines.own.plan import Draft, StepOutput, StepPlan
from tokenmill_worker.engines.own.scheduler import Lookahead
from tokenmill_worker.engines.own.sequence import Sequence


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
    capabilities: Capabilities = field(default_factory=Capabilities)
    # whether its first steps compile kernels and pack weights, so that they run before a request
    warms_up: bool = True
    # whether a step may be launched before the last one's tokens are known
    is_asynchronous: bool = False
    sampling_defaults: SamplingParams = NO_DEFAULTS  # of requests that name none
    # sequences, longest context and common prefix (or none) of the decodes to capture at the start
    graphed_decodes: tuple[tuple[int, int, bool], ...] = ()

    @property
    def can_structure(self) -> bool:
        return bool(self.capabilities.structured)


@dataclass(frozen=True, slots=True)
class RunnerHooks:
    """Parts and calls of a runner that planning needs; None where the runner has no such part."""

    propose: Callable[[Sequence], Draft] | None = None  # drafts tokens
    # makes a draft model's drafts, which `propose` returns, before a step is planned
    draft: Callable[[Lookahead], None] | None = None
    # returns whether recurrent states after the block with this hash are kept
    has_state: Callable[[bytes], bool] | None = None
    disk: DiskTier | None = None  # blocks below the host pool


NO_HOOKS = RunnerHooks()


class Runner(Protocol):
    """Executes plans on a device."""

    info: RunnerInfo
    hooks: RunnerHooks

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
