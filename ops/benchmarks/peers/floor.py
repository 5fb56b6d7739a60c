"""The floor: our engine and scheduler on the same requests, with steps of linear layers alone.

Shapes come from the model's configuration. Weights are random, and each layer has its own, so they
come from memory as in the model. Queries, keys and values are one product; gate and up are another.
The tokens mean nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ops.benchmarks.measure.protocol import serve
from ops.benchmarks.peers.ours import Tokenmill
from tokenmill_worker.engine import Engine, EngineConfig
from tokenmill_worker.engine.cache_config import CacheConfig, LayerGroup
from tokenmill_worker.engine.execution.interface import RunnerInfo
from tokenmill_worker.engine.model.model_files import resolve
from tokenmill_worker.engine.plan import StepOutput, StepPlan
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.sequence import Sequence

_TOKEN = 100
_JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MKL_ROWS = 256  # rows for which MKL packs; the packing works for any number

Product = Callable[[Tensor], Tensor]


class LinearStack:
    """Linear layers of a model by MKL, weights packed once.

    `run(num_tokens, num_rows)` computes all layers, then the head: the layers get `num_tokens`
    rows, the head `num_rows`.
    """

    def __init__(self, shapes: list[tuple[int, int]], max_tokens: int) -> None:
        """Raises RuntimeError if torch was built without MKL."""
        if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            raise RuntimeError("this torch was built without MKL")
        self._inputs = {k: torch.randn(max_tokens, k) for _, k in shapes}
        *self._body, self._head = [(_product(torch.randn(n, k) / k**0.5), k) for n, k in shapes]

    def run(self, num_tokens: int, num_rows: int) -> None:
        for product, k in self._body:
            product(self._inputs[k][:num_tokens])
        if num_rows:
            product, k = self._head
            product(self._inputs[k][:num_rows])


def shapes_of(folder: Path) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of every product of one pass, in order, the head last."""
    config = AutoConfig.from_pretrained(folder).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    head = model.get_output_embeddings()
    shapes = [shape for module in model.modules() for shape in _products(module, head)]
    return [*shapes, (head.out_features, head.in_features)]


def _products(module: nn.Module, head: nn.Module) -> Iterator[tuple[int, int]]:
    linears = {
        name: child
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) and child is not head
    }
    for names in _JOINT:
        parts = [linears.pop(name) for name in names if name in linears]
        if parts:
            yield sum(part.out_features for part in parts), parts[0].in_features
    for linear in linears.values():
        yield linear.out_features, linear.in_features


def _product(weight: Tensor) -> Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_ROWS)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, _MKL_ROWS)


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
                config.block_size, (group,), num_blocks, prefix_cache=config.prefix_cache
            ),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=frozenset(),
            model_path=Path(),
            description="linear layers alone: MKL, packed once",
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
    def _load(self, config: EngineConfig) -> Engine:
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        shapes = shapes_of(resolve(config.model))
        stack = LinearStack(shapes, config.max_num_batched_tokens)
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
