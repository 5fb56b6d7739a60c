"""Runs steps by replaying CUDA graphs: one per padded shape, the least recently used dropped first.

A decode is captured when its shape is first seen. A mixed shape is captured after SIGHTINGS steps,
since most mixed shapes never recur and a capture costs many eager steps. Large mixed steps stay
eager. Mixed graphs may fill only a quarter of the places, so that they do not evict decodes. If a
capture fails, later shapes run eagerly and the log says why. Errors of the step itself are raised,
not counted as such a failure.

One set of inputs per shape suffices even when steps are launched ahead: copies, replay and whatever
reads the output are queued on one stream in that order. An output is valid until the same shape
runs again.
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

from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.cuda.graph_inputs import (
    PaddedShape,
    StaticInputs,
    padded_batch,
    padded_shape,
)
from tokenmill_worker.engine.device import Forward, GraphSizes, StepInputs

log = logging.getLogger(__name__)

REMEMBERED_SHAPES = 1024  # mixed shapes whose sightings are counted
SIGHTINGS = 4  # steps of a mixed shape before it is captured
LARGEST_MIXED = 1024  # tokens; larger steps run longer than their launch takes


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


@dataclass(frozen=True, slots=True)
class _Entry:
    inputs: StaticInputs
    graph: CapturedGraph


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
        self._entries: OrderedDict[PaddedShape, _Entry] = OrderedDict()
        self._sightings: OrderedDict[PaddedShape, int] = OrderedDict()
        self._max_mixed = max(1, config.max_cached_graphs // 4)
        self.refusal: str | None = None  # why capturing was turned off; None: it is on
        self.num_captured = 0
        self.num_replays = 0

    @property
    def shapes(self) -> tuple[PaddedShape, ...]:
        """The shapes that have a graph, the least recently used first."""
        return tuple(self._entries)

    def run(self, inputs: StepInputs) -> Tensor:
        """Run the step and return its logits `[num_rows, vocab]`."""
        shape = padded_shape(inputs, self._config, self._max_model_len)
        entry = self._entries.get(shape)
        if entry is not None:
            self._entries.move_to_end(shape)
            entry.inputs.load(inputs)
        elif self._is_worth_capturing(shape):
            entry = self._captured(shape, inputs)
        if entry is None:
            return self._forward(inputs)
        entry.graph.replay()
        self.num_replays += 1
        return entry.graph.output[: inputs.rows.shape[0]]

    def _is_worth_capturing(self, shape: PaddedShape) -> bool:
        if self.refusal is not None or not (shape.is_decode or shape.num_tokens <= LARGEST_MIXED):
            return False
        if shape.is_decode:
            return True
        sightings = self._sightings.pop(shape, 0) + 1
        if sightings == SIGHTINGS:
            return True
        self._sightings[shape] = sightings
        if len(self._sightings) > REMEMBERED_SHAPES:
            self._sightings.popitem(last=False)
        return False

    def _make_room(self, shape: PaddedShape) -> None:
        mixed = [known for known in self._entries if not known.is_decode]
        if not shape.is_decode and len(mixed) >= self._max_mixed:
            del self._entries[mixed[0]]
        while len(self._entries) >= self._config.max_cached_graphs:
            self._entries.popitem(last=False)

    def _captured(self, shape: PaddedShape, inputs: StepInputs) -> _Entry | None:
        static = StaticInputs(shape, inputs)
        static.load(inputs)
        self._make_room(shape)
        try:
            graph = self._capture(lambda: self._forward(static.current()))
        except CaptureError as error:
            self.refusal = str(error)
            log.warning(
                "A CUDA graph could not be captured; further steps run without graphs: %s",
                self.refusal,
            )
            return None
        self.num_captured += 1
        entry = self._entries[shape] = _Entry(static, graph)
        return entry


def graph_sizes(config: EngineConfig) -> GraphSizes:
    """Return the sizes of all graphs that these settings allow."""
    if not config.cuda_graphs:
        return GraphSizes()
    batches = sorted({padded_batch(n) for n in range(1, config.max_num_seqs + 1)})
    kept = batches[-config.max_cached_graphs :]
    decodes = tuple(min(size, config.max_num_seqs) for size in batches)
    return GraphSizes(sum(kept), max(LARGEST_MIXED, *kept), _captured_at_start(decodes, config))


def _captured_at_start(decodes: tuple[int, ...], config: EngineConfig) -> tuple[int, ...]:
    """Return the decodes to capture at the start, in descending order.

    Small ones are the commonest; captured last, they are kept longest. Mixed steps have places of
    their own. If places are short, small shapes and the largest batch, which a busy service runs,
    are kept.
    """
    places = max(1, config.max_cached_graphs - config.max_cached_graphs // 4)
    if len(decodes) <= places:
        return decodes[::-1]
    return (*decodes[: places - 1], decodes[-1])[::-1]
