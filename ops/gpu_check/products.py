"""Times the matrix products of a model by batch, with each of torch's libraries on a GPU."""

from collections.abc import Iterator

import torch

from ops.benchmarks.measure.step_floor import Ceilings, Shape
from ops.gpu_check.timing import seconds_a_call

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LIBRARIES = ("cublas", "cublaslt")
NAMES = ("qkv", "o", "gate and up", "down", "head")
COLD_BYTES = 256 << 20  # of all copies of a weight: more than the second-level cache holds


def products(
    shape: Shape, ceilings: Ceilings, device: torch.device, dtype: torch.dtype
) -> Iterator[str]:
    """Yield a line for each product: its bytes per second by batch, in percent of a copy's."""
    batches = BATCHES if device.type == "cuda" else (1, 4)
    for name, (outputs, inputs, _) in zip(NAMES, shape.products, strict=True):
        cells = []
        size = outputs * inputs * dtype.itemsize
        copies = min(16, -(-COLD_BYTES // size)) if device.type == "cuda" else 1
        weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(copies)]
        for batch in batches:
            rows = torch.randn(batch, inputs, device=device, dtype=dtype)
            moved = size + batch * (inputs + outputs) * dtype.itemsize
            shares = [
                f"{100 * moved / seconds / ceilings.copied_bytes_s:.0f}"
                for seconds in _by_library(weights, rows, device)
            ]
            cells.append(f"{batch}: {'/'.join(shares)}")
        yield f"{name} {outputs}×{inputs}, % of copy: {', '.join(cells)}"


def _by_library(
    weights: list[torch.Tensor], rows: torch.Tensor, device: torch.device
) -> Iterator[float]:
    works = [lambda weight=weight: torch.nn.functional.linear(rows, weight) for weight in weights]
    if device.type != "cuda":
        yield seconds_a_call(works, device)
        return
    before = torch.backends.cuda.preferred_blas_library()
    try:
        for library in LIBRARIES:
            torch.backends.cuda.preferred_blas_library(library)
            yield seconds_a_call(works, device)
    finally:
        torch.backends.cuda.preferred_blas_library(before)
