"""Runs steps by replaying CUDA graphs, one per padded shape.

Decodes of every padded batch and length are captured at the start. A mixed shape is captured after
SIGHTINGS steps, since most mixed shapes never recur and a capture costs many eager steps. Mixed
graphs fill at most a quarter of the places, and none replaces another: with the places full, other
mixed steps run eagerly, as large ones do. A decode that finds no place replaces the least recently
used graph. If a capture fails, later shapes run eagerly and the log says why. Errors of the step
itself are raised, not counted as such a failure.

All graphs read one set of inputs and write their logits to one tensor. This suffices even when
steps are launched ahead: copies, replay and whatever reads the output are queued on one stream in
that order. An output is valid until the next step runs.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention.common_prefix import LEAST_SEQS
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.cuda.graph_inputs import (
    LARGEST_MIXED,
    PaddedShape,
    StaticInputs,
    most_rows,
    most_seqs,
    padded_batch,
    padded_lengths,
    padded_shape,
)
from tokenmill_worker.engines.own.device import Forward, GraphedDecode, GraphSizes, StepInputs

log = logging.getLogger(__name__)

REMEMBERED_SHAPES = 1024  # mixed shapes whose sightings are counted
SIGHTINGS = 4  # steps of a mixed shape before it is captured


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph.

    `replay` queues the captured work, which writes its result to `output`.
    """

    replay: Callable[[], None]
    output: Tensor


class CaptureError(RuntimeError):
    """The work cannot be captured."""


class Capture(Protocol):
    """Records the work of `run` after at least one plain run; errors of `run` are passed on."""

    def __call__(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """Capture `run`. Raises CaptureError if it cannot be captured."""
        ...


class CudaCapture:
    """Captures CUDA graphs that share one memory pool.

    Work that waits for the device is refused before a capture begins: in torch before 2.12, a
    failed capture leaves the allocator in capture mode.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> CapturedGraph:
        stream = torch.cuda.current_stream()
        self._stream.wait_stream(stream)
        try:
            with torch.cuda.stream(self._stream):
                run()  # compiles kernels and fills workspaces, which is forbidden in a capture
                with _refusal(), _no_waiting():
                    run()
        finally:
            stream.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with _refusal(), recording:
                output = run()
        finally:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
        return CapturedGraph(graph.replay, output)


@contextlib.contextmanager
def _refusal() -> Iterator[None]:
    """Raise any error of a kernel or the driver as CaptureError."""
    try:
        yield
    except Exception as error:
        raise CaptureError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise an error whenever a call waits for the device, inside this context.

    It also affects other threads, so they must not wait meanwhile.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class GraphRunner:
    """Replaces `forward` by graph replays where possible.

    `num_captured` and `num_replays` count since the start.
    """

    def __init__(
        self, forward: Forward, config: EngineConfig, max_model_len: int, capture: Capture
    ) -> None:
        self._forward = forward
        self._config = config
        self._max_model_len = max_model_len
        self._capture = capture
        self._static: StaticInputs | None = None
        self._logits: Tensor | None = None  # [most_rows, vocab]
        self._graphs: OrderedDict[PaddedShape, CapturedGraph] = OrderedDict()
        self._sightings: OrderedDict[PaddedShape, int] = OrderedDict()
        self._max_mixed = max(1, config.max_cached_graphs // 4)
        self.refusal: str | None = None  # why capturing was turned off; None: it is on
        self.num_captured = 0
        self.num_replays = 0

    @property
    def shapes(self) -> tuple[PaddedShape, ...]:
        """The shapes that have a graph, the least recently used first."""
        return tuple(self._graphs)

    def run(self, inputs: StepInputs) -> Tensor:
        """Run the step and return its logits `[num_rows, vocab]`."""
        shape = padded_shape(inputs, self._config, self._max_model_len)
        graph = self._graphs.get(shape)
        if graph is None and not self._is_worth_capturing(shape):
            return self._forward(inputs)
        if self._static is None:
            self._static = StaticInputs(inputs, self._config, self._max_model_len)
        self._static.load(shape, inputs)
        if graph is None:
            graph = self._captured(shape, self._static)
        if graph is None:
            return self._forward(inputs)
        self._graphs.move_to_end(shape)
        graph.replay()
        self.num_replays += 1
        return graph.output[: inputs.rows.shape[0]]

    def _is_worth_capturing(self, shape: PaddedShape) -> bool:
        if self.refusal is not None:
            return False
        if shape.is_decode:
            return True
        num_mixed = sum(not known.is_decode for known in self._graphs)
        if shape.num_tokens > LARGEST_MIXED or num_mixed >= self._max_mixed:
            return False
        sightings = self._sightings.pop(shape, 0) + 1
        if sightings == SIGHTINGS:
            return True
        self._sightings[shape] = sightings
        if len(self._sightings) > REMEMBERED_SHAPES:
            self._sightings.popitem(last=False)
        return False

    def _captured(self, shape: PaddedShape, static: StaticInputs) -> CapturedGraph | None:
        while len(self._graphs) >= self._config.max_cached_graphs:
            self._graphs.popitem(last=False)

        def run() -> Tensor:
            return self._keep(self._forward(static.current(shape)))

        try:
            graph = self._capture(run)
        except CaptureError as error:
            self.refusal = str(error)
            log.warning(
                "A CUDA graph could not be captured; further steps run without graphs: %s",
                self.refusal,
            )
            return None
        self.num_captured += 1
        self._graphs[shape] = graph
        return graph

    def _keep(self, logits: Tensor) -> Tensor:
        """Copy logits to the tensor that all graphs share, so that none keeps its own."""
        num_rows, vocab = logits.shape
        if self._logits is None:  # outside of a capture: a shape runs once before it is captured
            self._logits = logits.new_empty(most_rows(self._config), vocab)
        return self._logits[:num_rows].copy_(logits)


def graph_sizes(config: EngineConfig, max_model_len: int) -> GraphSizes:
    """Return the sizes of all graphs that these settings allow."""
    if not config.cuda_graphs:
        return GraphSizes()
    largest = max(LARGEST_MIXED, most_seqs(config))
    return GraphSizes(most_rows(config), largest, _captured_at_start(config, max_model_len))


def _captured_at_start(config: EngineConfig, max_model_len: int) -> tuple[GraphedDecode, ...]:
    """Return the decodes to capture at the start, the largest first.

    Later captures reuse the memory of earlier ones, and those captured last are kept longest. Mixed
    steps have places of their own. If places are short, short contexts are kept, and of these the
    small batches and the largest, which a busy service runs; decodes with a common prefix are then
    captured when a step first needs them.
    """
    batches = sorted({padded_batch(n) for n in range(1, config.max_num_seqs + 1)})
    sizes = [min(size, config.max_num_seqs) for size in batches]
    lengths = padded_lengths(config, max_model_len)
    decodes = [GraphedDecode(size, length) for length in lengths for size in sizes]
    places = max(1, config.max_cached_graphs - config.max_cached_graphs // 4)
    if config.adapters:  # each decode is captured with adapters and without
        places = max(1, places // 2)
    if len(decodes) > places:
        decodes = [*decodes[: places - 1], decodes[max(places, len(sizes)) - 1]]
    prefixed = [GraphedDecode(size, max_model_len, True) for size in sizes if size >= LEAST_SEQS]
    may_share = config.prefix_cache and config.attention == "triton"
    if may_share and len(decodes) + len(prefixed) <= places:
        decodes += prefixed
    return tuple(reversed(decodes))
