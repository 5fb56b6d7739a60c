"""A whole pass without the frame that Transformers puts around a decoder's layers.

Once the layers are one call, most of what is left of the modelling code is Python that has nothing to say here:
defaults for arguments, masks that nobody reads, rotary tables computed anew, outputs wrapped and unwrapped. It takes
0.8 ms a step, an eighth of what a single sequence takes. Here the model's own modules are called one after the other,
with rotary tables that are kept. It is used only where it gives the model's logits, bit for bit, on random tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine.attention.cpu import CpuAttention
from worker.engine.model.fused.agreement import two_prompts
from worker.engine.model.fused.layer import FusedLayer, FusedList, FusedRow
from worker.engine.model.fused.layer_calls import LayerParts
from worker.engine.model.fused.layers import BLOCK_SIZE, small_step
from worker.engine.model.fused.modules import FusedNorm, PackedLinear
from worker.engine.model.paged import AttentionStep, PagedStep

log = logging.getLogger(__name__)

_CHANGING = ("dynamic", "longrope")  # whose frequencies depend on the longest sequence
_FIRST_LENGTH = 4096


class RotaryTables:
    """Cosines and sines of every position, as the model's own module gives them, in tables that grow by doubling."""

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._tables = self._computed(_FIRST_LENGTH)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[1, num_tokens, rotary_dim]` each, of positions `[num_tokens]`."""
        try:
            cos, sin = (table.index_select(0, positions) for table in self._tables)
        except IndexError:
            self._tables = self._computed(max(int(positions.max()) + 1, 2 * len(self._tables[0])))
            cos, sin = (table.index_select(0, positions) for table in self._tables)
        return cos[None], sin[None]

    def _computed(self, length: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = self._rotary(torch.empty(1), torch.arange(length)[None])
        return cos[0].contiguous(), sin[0].contiguous()


class DirectForward:
    """Embedding, layers, last norm and head of one model."""

    def __init__(
        self, embed: nn.Module, rotary: RotaryTables, layers: FusedRow, norm: nn.Module, head: nn.Module
    ) -> None:
        self._embed, self._rotary, self._layers, self._norm, self._head = embed, rotary, layers, norm, head

    def __call__(self, input_ids: Tensor, positions: Tensor, rows: Tensor, step: AttentionStep) -> Tensor | None:
        """Logits `[num_rows, vocab]` of the packed tokens (`[num_tokens]`) at `rows`; None where a step needs the
        model itself: another backend, or somebody between the parts of the layers.
        """
        if not isinstance(step, PagedStep) or not isinstance(step.backend, CpuAttention):
            return None
        kwargs = {"paged": step, "position_embeddings": self._rotary(positions)}
        hidden = self._layers.at_once(self._embed(input_ids[None]), kwargs)
        if hidden is None:
            return None
        read = hidden[0] if len(rows) == len(input_ids) else hidden[0].index_select(0, rows)
        logits: Tensor = self._head(self._norm(read))
        return logits


def find_direct(model: nn.Module) -> DirectForward | None:
    """None where the model is no such decoder, or where something between its parts changes the logits."""
    found = _built(model)
    if found is None:
        return None
    direct, parts = found
    step = small_step(parts)
    if step is None:
        return None
    try:
        agrees = _agrees(model, direct, step)
    except Exception as error:  # a call of its own: the model stays as it is
        log.debug("not called directly: %s", error)
        return None
    return direct if agrees else None


def _built(model: Any) -> tuple[DirectForward, list[LayerParts]] | None:
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    layers, norm, rotary = (getattr(base, name, None) for name in ("layers", "norm", "rotary_emb"))
    if not isinstance(layers, FusedList) or not isinstance(norm, FusedNorm) or not isinstance(rotary, nn.Module):
        return None
    head = model.get_output_embeddings()
    if not isinstance(head, PackedLinear) or getattr(rotary, "rope_type", _CHANGING[0]) in _CHANGING:
        return None
    try:
        tables = RotaryTables(rotary)
    except Exception as error:
        log.debug("no rotary tables: %s", error)
        return None
    parts = [layer.parts for layer in layers if isinstance(layer, FusedLayer)]
    return DirectForward(model.get_input_embeddings(), tables, layers.row, norm, head), parts


@torch.inference_mode()
def _agrees(model: Any, direct: DirectForward, step: PagedStep) -> bool:
    """Two prompts of random tokens, all rows and some; the positions are far apart, as if they went on."""
    metadata = two_prompts(BLOCK_SIZE)
    count = metadata.slot_mapping.numel()
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, model.get_input_embeddings().weight.shape[0], (count,), generator=generator)
    positions = torch.tensor([0, 1, _FIRST_LENGTH - 2, _FIRST_LENGTH - 1, 7])[:count]
    wanted = model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, paged=step).logits[0]
    for rows in (torch.arange(count), torch.tensor([1, count - 1])):
        found = direct(input_ids, positions, rows, step)
        if found is None or not torch.equal(found, wanted[rows]):
            return False
    return True
