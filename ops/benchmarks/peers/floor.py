"""The floor: our engine and scheduler on the same requests, with steps of linear layers alone.

Shapes come from the model's configuration. Weights are random, and each layer has its own, so they
come from memory as in the model. Queries, keys and values are one product; gate and up are another.
The tokens mean nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from ops.benchmarks.measure.collecting_engine import CollectingEngine
from ops.benchmarks.measure.protocol import serve
from ops.benchmarks.measure.step_floor import Shape
from ops.benchmarks.peers.ours import Tokenmill
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.model.model_files import resolve
from tokenmill_worker.engines.own.plan import StepOutput, StepPlan
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner

_TOKEN = 100
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
    """Return (outputs, inputs) of every product of one pass, the head last."""
    config = AutoConfig.from_pretrained(folder).get_text_config()
    *layer, head = Shape.of(config).products
    return [(n, k) for _ in range(config.num_hidden_layers) for n, k, _ in layer] + [head[:2]]


def _product(weight: Tensor) -> Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_ROWS)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, _MKL_ROWS)


class FloorRunner(SyntheticRunner):
    """Computes a model's linear layers in each step; its tokens mean nothing."""

    stack: LinearStack

    @torch.inference_mode()
    def finish(self, plan: StepPlan) -> StepOutput:
        samples = sum(item.samples for item in plan.scheduled)
        if plan.num_tokens:
            self.stack.run(plan.num_tokens, samples)
        return StepOutput(plan.step_id, ((_TOKEN,),) * samples, (None,) * samples, {})


class Floor(Tokenmill):
    def _load(self, config: EngineConfig) -> CollectingEngine:
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        shapes = shapes_of(resolve(config.model))
        synthetic = SyntheticRunner.load(config.replace(model="synthetic?length=1000000"))
        said = "linear layers alone: MKL, packed once"
        info = replace(synthetic.info, vocab_size=shapes[-1][0], description=said)
        runner = FloorRunner(info, synthetic.options)
        runner.stack = LinearStack(shapes, config.max_num_batched_tokens)
        return CollectingEngine.around(runner)


if __name__ == "__main__":
    serve(Floor)
