"""Describes what differs between the devices that a model runs on.

`Device` is any device that torch knows, used through torch's own operators. `cpu.device` and
`cuda.device` override what they do better. Policy does not belong here: no scheduling, no sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.attention import AttentionMetadata
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.config.machine import available_memory
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling.draws import Kernel
from tokenmill_worker.engines.own.sequence import Sequence

_INTEGERS = {np.int64: torch.int64, np.int32: torch.int32}


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors that model and sampler read."""

    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    rows: Tensor  # int64 [num_rows]: the packed rows whose logits are wanted
    metadata: tuple[AttentionMetadata, ...]  # by layer group
    # int64 [num_tokens]: slots of LoRA adapters, −1: none; None: the step needs no slots
    adapter_slots: Tensor | None = None
    sequence_rows: tuple[int, ...] = ()  # each sequence's row, the same in all of its steps
    recurrence: Any = None  # runs the recurrent layers; None: the model has none


Forward = Callable[[StepInputs], Tensor]  # returns logits `[num_rows, vocab]`
BlockTables = Callable[[Seq[ScheduledSequence], int], list[Tensor]]
# tokens that follow those of a sequence, in this step alone
AssumedTokens = Mapping[Sequence, Seq[int]]


class FusedPass(Protocol):
    """A model's pass without Transformers' code around the layers; None where a step needs it."""

    @property
    def num_logits(self) -> int: ...

    def __call__(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, step: Any
    ) -> Tensor | None:
        """Return logits `[num_rows, num_logits]`, or None."""
        ...

    def argmax(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, step: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return each row's argmax token and its logit, or None."""
        ...


AddRows = Callable[[Tensor, Tensor], None]  # (rows [m, k], products [m, n]): adds in place
# first output and number of outputs of each layer that a product computes; "": all of the module
LayerRanges = Mapping[str, tuple[int, int]]


class AdaptedProduct(NamedTuple):
    """A product of a replaced module. LoRA adapters act on ranges of its outputs."""

    name: str  # of the attribute that computes it
    in_features: int
    out_features: int
    layers: LayerRanges


@runtime_checkable
class AdaptedProducts(Protocol):
    """A replaced module in whose products LoRA adapters act.

    Adapters name the layers of the model as Transformers builds it. `replaced` is the child that
    is the module of before, whose path adapters use without this name; "": there is none.
    """

    replaced: str

    def products(self) -> Iterable[AdaptedProduct]: ...

    def adapt(self, add_to: Callable[[str], AddRows]) -> Callable[[], None]:
        """Send each product through `add_to(its name)` until the returned function is called."""
        ...


def ranges_of_attention(query: int, key: int) -> dict[str, tuple[int, int]]:
    """Return the layers of a joint product of queries, keys and values of these sizes."""
    layers = {"q_proj": (0, query), "k_proj": (query, key), "v_proj": (query + key, key)}
    return layers | {"qkv_proj": (0, query + 2 * key)}


def ranges_of_mlp(size: int) -> dict[str, tuple[int, int]]:
    """Return the layers of a joint product of gate and up, each of this size."""
    return {"gate_proj": (0, size), "up_proj": (size, size), "gate_up_proj": (0, 2 * size)}


def adapt_linear(linear: nn.Module, add: AddRows) -> Callable[[], None]:
    """Send a linear layer's products through `add` until the returned function is called."""
    forward = linear.forward

    def run(x: Tensor) -> Tensor:
        y: Tensor = forward(x)
        add(x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]))
        return y

    linear.__dict__["forward"] = run
    return partial(linear.__dict__.pop, "forward")


class RepeatedInputs(Protocol):
    """Inputs of a decode that a later decode of the same sequences may reuse."""

    def advance(
        self,
        items: Seq[ScheduledSequence],
        block_tables: BlockTables,
        assumed: AssumedTokens | None = None,
    ) -> StepInputs | None:
        """Return the inputs of the next decode; None, and no change, if it is not such a decode.

        `block_tables(items, length)` returns the current block tables by layer group.
        """
        ...


class PinnedMemory(Protocol):
    """Host memory that the device accesses directly, until `close`."""

    def close(self) -> None: ...


class Graphs(Protocol):
    """A forward pass that replays captured graphs where possible."""

    num_captured: int
    num_replays: int

    def run(self, inputs: StepInputs) -> Tensor: ...


class GraphedDecode(NamedTuple):
    """A decode whose graph is captured at the start."""

    num_seqs: int
    context: int  # tokens of the longest sequence
    has_prefix: bool = False  # all sequences begin alike


class GraphSizes(NamedTuple):
    """Sizes of the graphs that may be captured."""

    num_rows: int = 0  # of the largest step
    num_tokens: int = 0  # of the largest step
    decodes: tuple[GraphedDecode, ...] = ()  # to be captured at the start, in order


class Device:
    """One device. Only the engine's thread uses it."""

    is_asynchronous = False  # whether it queues work, so that the host can run ahead
    uses_host_memory = False  # whether other programs of this machine share its memory

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    # ── weights ──

    def weight_type(self, stored: torch.dtype | None) -> torch.dtype:
        """Return the type of the weights for "auto": the stored 16-bit type, else bfloat16."""
        return stored if stored in (torch.float16, torch.bfloat16) else torch.bfloat16

    def replace_modules(self, model: nn.Module, config: EngineConfig) -> FusedPass | None:
        """Replace a loaded model's modules in place; return its whole pass, or None.

        Raises EngineConfigError where a requested quantisation is not possible.
        """
        if config.quantization is not None:
            raise cannot_quantize(config, next(model.parameters()))
        return None

    # ── memory ──

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a zeroed uint8 tensor `[num_bytes]`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def free_memory(self) -> int:
        """Return the bytes that can be allocated now."""
        return available_memory()

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Run a pass and return its peak of allocated bytes; 0, without a run, if unknown."""
        return 0

    def pin(self, tensors: Seq[Tensor]) -> PinnedMemory | None:
        """Pin host tensors for direct access; return None where it gains nothing."""
        return None

    def copy_stream(self) -> torch.cuda.Stream | None:
        """Return a stream for copies beside the computation; None where copies are synchronous."""
        return None

    # ── a step ──

    def upload(
        self, arrays: Seq[npt.NDArray[Any]], kind: type[np.int64 | np.int32]
    ) -> list[Tensor]:
        """Copy all arrays to the device in one copy."""
        total = sum(array.size for array in arrays)
        staging = self._staging(total, _INTEGERS[kind])
        flat = staging.numpy()
        offset = 0
        for array in arrays:
            flat[offset : offset + array.size] = array.ravel()
            offset += array.size
        moved = staging.to(self.torch_device, non_blocking=True)
        parts = torch.split(moved, [array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def _staging(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def repeated_inputs(
        self, items: Seq[ScheduledSequence], inputs: StepInputs
    ) -> RepeatedInputs | None:
        """Return `inputs` of a decode that samples every row in a form for reuse, or None."""
        return None

    def token_kernel(self, config: EngineConfig) -> Kernel | None:
        """Return the kernel that samples tokens; None where torch samples."""
        return None

    def graphs(self, forward: Forward, config: EngineConfig, max_model_len: int) -> Graphs | None:
        """Return `forward` with replays of captured graphs; None where there are none."""
        return None

    def graph_sizes(self, config: EngineConfig, max_model_len: int) -> GraphSizes:
        return GraphSizes()

    def end_of_queue(self) -> torch.cuda.Event | None:
        """Return an event at the end of the queued work; None where nothing is queued."""
        return None

    def is_alive(self) -> bool:
        """Return whether the device works; after a permanent failure every call on it fails."""
        return True


def cannot_quantize(config: EngineConfig, weight: Tensor) -> EngineConfigError:
    """Return the error of a quantisation that this device or type does not support."""
    needed = "the CPU, in float32"
    if config.quantization == "fp8":
        needed = "a GPU of compute capability 8.9 or more, in bfloat16"
    return EngineConfigError([
        f"quantization {config.quantization!r} runs on {needed}, "
        f"not on {weight.device.type} in {str(weight.dtype).removeprefix('torch.')}"
    ])  # fmt: skip
