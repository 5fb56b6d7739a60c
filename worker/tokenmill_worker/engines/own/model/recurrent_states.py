"""Recurrent states of sequences, and a step's pass through a recurrent layer.

A layer runs by sequence, on its tokens and its state. Sequences of equal lengths run together: all
decodes, and prompts that begin, or go on, with as many tokens. A state has two slots. A step reads
the one that holds its first position and writes the other, so a step that failed can run again.
Checkpoints are kept for the prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STATE_SLOTS = 2  # of each state

# (hidden states `[batch, num_tokens, hidden_size]`, their states) → output of the same shape
RunLayer = Callable[[Tensor, "LayerStates"], Tensor]


@dataclass(frozen=True, slots=True)
class _EveryLayer:
    """The layers of Transformers' cache: each is the layer at hand, with its states by number."""

    conv_states: dict[int, Tensor]
    recurrent_states: dict[int, Tensor]
    record_past: bool = False

    def __getitem__(self, layer_idx: int) -> _EveryLayer:
        return self


@dataclass(slots=True)
class LayerStates:
    """The states of some sequences in one layer, with the functions of Transformers' cache that
    its module calls.

    A state is known by its name and number; its tensor is `[batch, …]`.
    """

    tensors: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return whether a convolution has run; modules of Transformers before 5.21 ask."""
        return any(name == "conv" and state_idx in (None, index) for name, index in self.tensors)

    @property
    def layers(self) -> _EveryLayer:
        """The cache's layers, from which modules of Transformers before 5.21 read their states."""
        return _EveryLayer(self._of("conv"), self._of("recurrent"))

    def _of(self, name: str) -> dict[int, Tensor]:
        return {index: tensor for (of, index), tensor in self.tensors.items() if of == name}

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Keep the last inputs of a convolution; return the known ones followed by the new ones.

        `conv_states` is `[batch, channels, num_tokens]`. A sequence that is shorter than the kernel
        has zeros before it.
        """
        known = self.tensors.get(("conv", state_idx))
        if known is None:
            size = conv_kernel_size or conv_states.shape[-1]
            missing = max(0, size - conv_states.shape[-1])
            together = nn.functional.pad(conv_states, (missing, 0))
        else:
            size = known.shape[-1]
            together = torch.cat([known, conv_states], dim=-1)
        self.tensors["conv", state_idx] = together[..., -size:]
        return together

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.tensors["recurrent", state_idx] = recurrent_states
        return recurrent_states


class StatePool:
    """The states of every layer: two slots for each of `num_rows` sequences, and checkpoints, which
    are states that later sequences with the same tokens continue from. Allocated when first
    written.
    """

    def __init__(self, num_rows: int, device: torch.device, num_checkpoints: int = 0) -> None:
        self._device = device
        # the number of tokens that each slot has seen; −1: the slot holds nothing
        self._seen = [[-1, -1] for _ in range(num_rows)]
        # slots of checkpoints by the hash of their tokens, the least recently used first
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()
        self._num_checkpoints = num_checkpoints
        self._read: set[int] = set()  # checkpoints that the newest step reads
        # by layer and state: [num_checkpoints + STATE_SLOTS · num_rows, …]
        self._tensors: dict[int, dict[tuple[str, int], Tensor]] = {}

    def step(
        self,
        rows: Sequence[int],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        keys: Sequence[bytes | None] | None = None,
    ) -> RecurrentStep:
        """Choose the slots of a step.

        Args:
            rows: the row of each sequence; it must be the same in all steps of the sequence.
            query_lens: the packed tokens of each sequence.
            seq_lens: the tokens of each sequence up to the last packed one.
            keys: the hash of each sequence's tokens before the first packed one, if it is known.

        Raises:
            RuntimeError: a sequence has no state at its first packed token.
        """
        self._grow(1 + max(rows))
        self._read.clear()
        spans = []
        first = 0
        for row, length, end, key in zip(
            rows, query_lens, seq_lens, keys or [None] * len(rows), strict=True
        ):
            source, written = self._source(row, end - length, key)
            self._seen[row][written] = end
            spans.append(_Span(first, length, source, self._slot(row, written)))
            first += length
        return RecurrentStep(self, spans, self._device)

    def _source(self, row: int, start: int, key: bytes | None) -> tuple[int | None, int]:
        """Return the slot that holds the state at `start` (None: there is no token before it), and
        which of the row's slots is written.
        """
        seen = self._seen[row]
        if start and start in seen:
            read = seen.index(start)
            return self._slot(row, read), 1 - read
        seen[:] = [-1, -1]
        if not start:
            return None, 0
        source = None if key is None else self._checkpoints.get(key)
        if source is None:
            raise RuntimeError(f"a sequence has no recurrent states at token {start}")
        self._read.add(source)
        return source, 0

    def _slot(self, row: int, index: int) -> int:
        return self._num_checkpoints + STATE_SLOTS * row + index

    def release(self, row: int) -> None:
        """Forget the states of a row, which another sequence may take."""
        if row < len(self._seen):
            self._seen[row] = [-1, -1]

    # ── checkpoints ──

    def has_checkpoint(self, key: bytes) -> bool:
        """Return whether the states after these tokens are kept; they become the newest."""
        if key not in self._checkpoints:
            return False
        self._checkpoints.move_to_end(key)
        return True

    def keep(self, row: int, end: int, key: bytes) -> None:
        """Keep the states that a row has after `end` tokens, in place of the least recently used.

        Checkpoints that the newest step reads stay: it may have to run again.
        """
        if self.has_checkpoint(key):
            return
        target = len(self._checkpoints)
        if target == self._num_checkpoints:
            oldest = next(
                (old for old, slot in self._checkpoints.items() if slot not in self._read), None
            )
            if oldest is None:
                return
            target = self._checkpoints.pop(oldest)
        self._checkpoints[key] = target
        source = self._slot(row, self._seen[row].index(end))
        for tensors in self._tensors.values():
            for tensor in tensors.values():
                tensor[target] = tensor[source]

    # ── a layer's states ──

    def load(self, layer: int, slots: Tensor) -> LayerStates:
        tensors = self._tensors[layer].items()
        return LayerStates({key: tensor.index_select(0, slots) for key, tensor in tensors})

    def store(self, layer: int, slots: Tensor, states: LayerStates) -> None:
        tensors = self._tensors.setdefault(layer, {})
        for key, tensor in states.tensors.items():
            if key not in tensors:
                num_slots = self._slot(len(self._seen), 0)
                tensors[key] = tensor.new_zeros(num_slots, *tensor.shape[1:])
            tensors[key].index_copy_(0, slots, tensor)

    def _grow(self, num_rows: int) -> None:
        missing = num_rows - len(self._seen)
        if missing <= 0:
            return
        self._seen += [[-1, -1] for _ in range(missing)]
        for tensors in self._tensors.values():
            for key, tensor in tensors.items():
                more = tensor.new_zeros(STATE_SLOTS * missing, *tensor.shape[1:])
                tensors[key] = torch.cat([tensor, more])


class _Span(NamedTuple):
    """One sequence of a step: its packed tokens, the slot that it reads (None: it starts without a
    state) and the slot that it writes.
    """

    first: int
    length: int
    source: int | None
    target: int


class _Part(NamedTuple):
    """Sequences of a step that run together: their packed tokens, `batch` of equal lengths, the
    slots that they read and those that they write, `[batch]`.
    """

    tokens: slice | Tensor  # those of the first sequence, then those of the next, …
    batch: int
    sources: Tensor | None
    targets: Tensor


class RecurrentStep:
    """Runs recurrent layers on the packed tokens of one step."""

    def __init__(self, pool: StatePool, spans: Sequence[_Span], device: torch.device) -> None:
        self._pool = pool
        together: dict[tuple[int, bool], list[_Span]] = {}
        for span in spans:
            together.setdefault((span.length, span.source is None), []).append(span)
        self._parts = [_part(members, device) for members in together.values()]

    def recur(self, layer: int, run: RunLayer, hidden: Tensor) -> Tensor:
        """Run a layer; hidden states and output are `[1, num_tokens, hidden_size]`."""
        rows = hidden[0]
        if len(self._parts) == 1:
            return self._run(layer, run, rows, self._parts[0])[None]
        out = torch.empty_like(rows)
        for part in self._parts:
            out[part.tokens] = self._run(layer, run, rows, part)
        return out[None]

    def _run(self, layer: int, run: RunLayer, rows: Tensor, part: _Part) -> Tensor:
        """Run a layer on a part's tokens; return its output `[tokens of the part, hidden_size]`."""
        states = LayerStates()
        if part.sources is not None:
            states = self._pool.load(layer, part.sources)
        out = run(rows[part.tokens].view(part.batch, -1, rows.shape[-1]), states)
        self._pool.store(layer, part.targets, states)
        return out.flatten(0, 1)


def _part(spans: Sequence[_Span], device: torch.device) -> _Part:
    first, length, source, _ = spans[0]

    def ints(values: Any) -> Tensor:
        """Queue the copy, from memory that is pinned: a plain one waits for the steps before it."""
        found = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
        return found.to(device, non_blocking=True)

    tokens: slice | Tensor = slice(first, first + len(spans) * length)
    if any(span.first != first + index * length for index, span in enumerate(spans)):
        tokens = ints([token for span in spans for token in range(span.first, span.first + length)])
    return _Part(
        tokens,
        len(spans),
        None if source is None else ints([span.source for span in spans]),
        ints([span.target for span in spans]),
    )
