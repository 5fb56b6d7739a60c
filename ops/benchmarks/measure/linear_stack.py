"""Runs only the linear layers of a model: a lower bound for the time of an engine's steps.

Shapes come from the model's configuration. Weights are random, and each layer has its own, so they
come from memory as in the model. Queries, keys and values are one product; gate and up are another.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

INT4_GROUP = 32  # inputs that share a scale in torch's 4-bit weights
_JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MKL_ROWS = 256  # rows for which MKL packs; the packing works for any number

Product = Callable[[Tensor], Tensor]


class LinearStack:
    """Linear layers of a model, of a kind of KINDS.

    `run(num_tokens, num_rows)` computes all layers, then the head: the layers get `num_tokens`
    rows, the head `num_rows`.
    """

    def __init__(self, shapes: list[tuple[int, int]], kind: str, max_tokens: int) -> None:
        self.description, make = KINDS[kind]
        self._inputs = {k: torch.randn(max_tokens, k) for _, k in shapes}
        *self._body, self._head = [(make(torch.randn(n, k) / k**0.5), k) for n, k in shapes]

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


def _mkl(weight: Tensor) -> Product:
    """Raises RuntimeError if torch was built without MKL."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        raise RuntimeError("this torch was built without MKL")
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_ROWS)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, _MKL_ROWS)


def _fbgemm(weight: Tensor) -> Product:
    """Raises RuntimeError if torch was built without fbgemm."""
    torch.backends.quantized.engine = "fbgemm"
    scale = weight.abs().amax(dim=1).double() / 127
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # to be removed: then this floor goes with it
        rounded = torch.quantize_per_channel(weight, scale, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(rounded, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduce_range=True)


def _torch4(weight: Tensor) -> Product:
    n, k = weight.shape
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(k // INT4_GROUP, n, 2).bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.bfloat16(), packed, INT4_GROUP, scales
    )


KINDS: dict[str, tuple[str, Callable[[Tensor], Product]]] = {
    "mkl": ("MKL, packed once", _mkl),
    "fbgemm": ("fbgemm's 8 bits, rows rounded as they come", _fbgemm),
    "torch4": ("torch's 4-bit weights, rows in bfloat16", _torch4),
}
