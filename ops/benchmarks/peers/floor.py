"""The floor: our engine and scheduler on the same requests, with steps of linear layers alone.

`options.settings["floor"]` names the kind of linear layers. The tokens mean nothing.
"""

import dataclasses
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from ops.benchmarks.measure.linear_stack import LinearStack, shapes_of
from ops.benchmarks.measure.protocol import EngineOptions, serve
from ops.benchmarks.peers.ours import Tokenmill
from tokenmill_worker.engine import Engine, EngineConfig
from tokenmill_worker.engine.cache_config import CacheConfig, LayerGroup
from tokenmill_worker.engine.execution.interface import RunnerInfo
from tokenmill_worker.engine.model.model_files import resolve
from tokenmill_worker.engine.plan import StepOutput, StepPlan
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.sequence import Sequence

_TOKEN = 100


class FloorRunner:
    """Runner with those calls of `runner.ModelRunner` that a benchmark makes."""

    def __init__(
        self, config: EngineConfig, stack: LinearStack, vocab_size: int, max_model_len: int
    ) -> None:
        group = LayerGroup(layers=(0,), num_kv_heads=1, head_dim=1)
        num_blocks = config.num_blocks or 2
        self.info = RunnerInfo(
            config=config,
            cache_config=CacheConfig(
                config.block_size, (group,), (num_blocks,), (0,), config.prefix_cache
            ),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=frozenset(),
            model_path=Path(),
            description=f"linear layers alone: {stack.description}",
        )
        self._stack = stack

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    @torch.inference_mode()
    def finish(self, plan: StepPlan) -> StepOutput:
        samples = sum(item.samples for item in plan.scheduled)
        if plan.num_tokens:
            self._stack.run(plan.num_tokens, samples)
        return StepOutput(plan.step_id, ((_TOKEN,),) * samples, (None,) * samples, {})

    def prepare(self, params: Any) -> None:
        """Do nothing: no grammar needs compiling."""

    def prepare_adapter(self, name: str) -> Future[str]:
        raise ValueError("a floor has no adapters")

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Do nothing: the runner keeps no state of a sequence."""

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: the runner holds no resource."""


class Floor(Tokenmill):
    def __init__(self, options: EngineOptions) -> None:
        self._kind = str(options.settings["floor"])
        settings = {name: value for name, value in options.settings.items() if name != "floor"}
        super().__init__(dataclasses.replace(options, settings=settings))

    def _load(self, config: EngineConfig) -> Engine:
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        shapes = shapes_of(resolve(config.model))
        stack = LinearStack(shapes, self._kind, config.max_num_batched_tokens)
        runner = FloorRunner(config, stack, vocab_size=shapes[-1][0], max_model_len=1 << 20)
        scheduler = Scheduler(
            config,
            runner.info.cache_config,
            max_model_len=runner.info.max_model_len,
            eos_token_ids=runner.info.eos_token_ids,
        )
        return Engine(runner, scheduler)


if __name__ == "__main__":
    serve(Floor)
