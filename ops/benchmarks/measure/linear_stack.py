"""Runs only the linear layers of a model: a lower bound for the time of an engine's steps.

Shapes come from the model's configuration. Weights are random, and each layer has its own, so they
come from memory as in the model. Queries, keys and values are one product; gate and up are another.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from tokenmill_worker.engine.cpu.kernels.linear import (
    Epilogue,
    LinearArguments,
    LinearKernels,
    PackedWeight,
    Packer,
)
from tokenmill_worker.engine.cpu.kernels.program import KernelCall, Program
from tokenmill_worker.engine.cpu.kernels.quantized import INT4_GROUP, Int4Packer, Int8Packer

KINDS = {
    "torch": "F.linear",
    "mkl": "MKL, packed once",
    "fbgemm": "fbgemm's 8 bits, rows rounded as they come",
    "torch4": "torch's 4-bit weights, rows in bfloat16",
    "packed": "our float32 kernel",
    "int8": "our 8-bit kernel",
    "int4": "our 4-bit kernel, the head in 8 bits",
}
_JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MKL_ROWS = 256  # rows for which MKL packs; the packing works for any number

Product = Callable[[Tensor], Tensor]


class LinearStack:
    """Linear layers of a model; `run(num_tokens, num_rows)` computes all layers, then the head.

    The layers get `num_tokens` rows, the head `num_rows`.
    """

    def __init__(self, shapes: list[tuple[int, int]], kind: str, max_tokens: int) -> None:
        self.kind = kind
        self._inputs = {k: torch.randn(max_tokens, k) for _, k in shapes}
        *body, head = shapes
        if (make := _MAKERS.get(kind)) is not None:
            self._products = [(make(torch.randn(n, k) / k**0.5), k) for n, k in body]
            self._head = (make(torch.randn(*head) / head[1] ** 0.5), head[1])
            self.run = self._run_products
            return
        body_packer, head_packer = _packers(kind)
        width = max(n for n, _ in shapes) * max_tokens
        self._output = torch.empty(width)
        self._calls = [_Calls(body_packer, body, self._inputs, self._output, max_tokens)]
        self._calls.append(_Calls(head_packer, [head], self._inputs, self._output, max_tokens))
        self.run = self._run_calls

    def _run_products(self, num_tokens: int, num_rows: int) -> None:
        for product, k in self._products:
            product(self._inputs[k][:num_tokens])
        if num_rows:
            product, k = self._head
            product(self._inputs[k][:num_rows])

    def _run_calls(self, num_tokens: int, num_rows: int) -> None:
        for calls, rows in zip(self._calls, (num_tokens, num_rows), strict=True):
            if rows:
                calls.run(rows)


class _Calls:
    """Our kernels as one program, with no Python between them."""

    def __init__(
        self,
        packer: Packer,
        shapes: list[tuple[int, int]],
        inputs: dict[int, Tensor],
        output: Tensor,
        max_tokens: int,
    ) -> None:
        self._weights = [packer.pack(torch.randn(n, k) / k**0.5) for n, k in shapes]
        row_bytes = max(weight.row_bytes for weight in self._weights)
        self._workspace = torch.empty(max_tokens * row_bytes, dtype=torch.uint8)
        self._arguments = [
            self._prepare(weight, inputs[weight.k], output) for weight in self._weights
        ]
        steps = [
            KernelCall(w.member, a) for w, a in zip(self._weights, self._arguments, strict=True)
        ]
        self._program = Program(steps)

    def _prepare(self, weight: PackedWeight, x: Tensor, output: Tensor) -> LinearArguments:
        arguments = weight.arguments(Epilogue.PLAIN)
        arguments.x, arguments.y, arguments.workspace = (
            x.data_ptr(),
            output.data_ptr(),
            self._workspace.data_ptr(),
        )
        arguments.x_stride, arguments.y_stride = weight.k, weight.n
        return arguments

    def run(self, num_rows: int) -> None:
        for arguments in self._arguments:
            arguments.m = num_rows
        self._program.run(torch.get_num_threads(), _refuse)


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


def _packers(kind: str) -> tuple[Packer, Packer]:
    if kind == "packed":
        kernels = LinearKernels()
        return kernels, kernels
    int8 = Int8Packer()
    return (int8 if kind == "int8" else Int4Packer()), int8


def _torch(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


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


_MAKERS: dict[str, Callable[[Tensor], Product]] = {
    "torch": _torch,
    "mkl": _mkl,
    "fbgemm": _fbgemm,
    "torch4": _torch4,
}


def _refuse(_answer: int) -> None:
    raise RuntimeError("a linear kernel does not answer")
