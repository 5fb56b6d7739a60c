"""Runs a whole pass without the code that Transformers puts around a decoder's layers.

Once the layers run as one call, most of the remaining modelling code is Python without effect:
defaults for arguments, unused masks, recomputed rotary tables, wrapped outputs. It takes 0.8 ms a
step, an eighth of the time of a single sequence's step. Here embedding, layers, norm and head are
one program, with a cached rotary table. It is used only where it yields the model's logits, bit for
bit, on random tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.cpu.attention import CpuAttention
from tokenmill_worker.engines.own.cpu.fused.layer import FusedStack
from tokenmill_worker.engines.own.cpu.fused.layer_calls import (
    FLOAT_BYTES,
    LayerParts,
    Rotation,
    linear_arguments,
)
from tokenmill_worker.engines.own.cpu.fused.layer_matching import BLOCK_SIZE, small_step
from tokenmill_worker.engines.own.cpu.fused.layer_run import LayerRun, is_plain
from tokenmill_worker.engines.own.cpu.fused.modules import FusedNorm, PackedLinear
from tokenmill_worker.engines.own.cpu.kernels.argmax import ArgmaxOutputs
from tokenmill_worker.engines.own.cpu.kernels.linear import Epilogue
from tokenmill_worker.engines.own.cpu.kernels.program import (
    KernelCall,
    RowArguments,
    move_rows,
)
from tokenmill_worker.engines.own.model.equivalence import two_prompts
from tokenmill_worker.engines.own.model.paged_attention import AttentionStep, PagedStep
from tokenmill_worker.engines.own.model.replacement import LayersAsOne

log = logging.getLogger(__name__)

_CHANGING = ("dynamic", "longrope")  # rotary types whose frequencies depend on the longest sequence
_FIRST_LENGTH = 4096


class RotaryTable:
    """Cosines and sines of each position, as the model's own module computes them.

    `rows` is `[length, 2 * width]`, cosines beside sines; it grows by doubling.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self.rows = self._computed(_FIRST_LENGTH)
        self.width = self.rows.shape[1] // 2

    def grow(self, length: int) -> bool:
        """Compute the table up to `length`; return False if it is as long already."""
        if length <= len(self.rows):
            return False
        self.rows = self._computed(max(length, 2 * len(self.rows)))
        return True

    def _computed(self, length: int) -> Tensor:
        with torch.inference_mode():
            cos, sin = self._rotary(torch.empty(1), torch.arange(length)[None])
        return torch.cat([cos[0], sin[0]], dim=1).contiguous()


class WholePass:
    """Embedding, layers, last norm and head of one model as one call into the kernels."""

    def __init__(
        self,
        embed: nn.Embedding,
        rotary: RotaryTable,
        layers: FusedStack,
        norm: FusedNorm,
        head: PackedLinear,
    ) -> None:
        hidden = embed.weight.shape[1]
        self._rotary, self._layers, self._scratch = rotary, layers, layers.scratch
        self._around = (embed, norm, head)
        self.num_logits = head.packed.n
        self._scratch.reserve(
            {"in": hidden, "out": hidden, "rotation": 2 * rotary.width}, (head.packed,)
        )
        self._embed = RowArguments(
            source=embed.weight.data_ptr(), width=hidden, limit=embed.weight.shape[0]
        )
        self._rotate = RowArguments(width=2 * rotary.width)
        self._read = RowArguments(width=hidden)
        self._head = linear_arguments(head.packed, Epilogue.PLAIN, self.num_logits, norm)
        self._argmax = ArgmaxOutputs()
        self._run = LayerRun(
            layers.parts,
            self._scratch,
            before=[move_rows(self._embed), move_rows(self._rotate)],
            after=[
                move_rows(self._read),
                KernelCall(head.packed.member, self._head),
                self._argmax.step,
            ],
        )
        self._logits = torch.empty(0, self.num_logits)
        self._version = -1
        self._point_at_table()

    def __call__(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, step: AttentionStep
    ) -> Tensor | None:
        """Return logits `[num_rows, vocab]` at `rows` of the packed tokens (`[num_tokens]`).

        They are valid until the next call. Returns None where a step needs the model's own code:
        with another backend, or with hooks or replaced calls between its parts. Raises IndexError
        for a token outside the vocabulary.
        """
        if not self._takes(step):
            return None
        num_rows = rows.numel()
        if len(self._logits) != num_rows:
            self._logits = torch.empty((num_rows, self.num_logits))
        self._head.y = self._logits.data_ptr()
        self._pass(input_ids, positions, rows, step)
        return self._logits

    def argmax(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, step: AttentionStep
    ) -> tuple[Tensor, Tensor] | None:
        """Return each row's first highest logit like `__call__`, without the other logits.

        Returns token ids `[num_rows]` and logits `[num_rows]`, NaN for a row that holds one, or
        None as for a call or for too many rows. Both tensors stay valid during the next two calls.
        """
        if rows.numel() > self._argmax.most_rows or not self._takes(step):
            return None
        found = self._argmax.ask(self._head, rows.numel(), torch.get_num_threads())
        try:
            self._pass(input_ids, positions, rows, step)
        finally:
            self._argmax.dismiss(self._head)
        return found

    def _takes(self, step: AttentionStep) -> bool:
        return (
            isinstance(step, PagedStep)
            and isinstance(step.backend, CpuAttention)
            and self._can_fuse()
        )

    def _pass(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, step: AttentionStep
    ) -> None:
        assert isinstance(step, PagedStep)
        num_tokens = input_ids.numel()
        self._scratch.fit(num_tokens)
        if self._version != self._scratch.version:
            self._point()
        self._embed.from_rows, self._rotate.from_rows = input_ids.data_ptr(), positions.data_ptr()
        self._embed.count = self._rotate.count = num_tokens
        self._read.from_rows = rows.data_ptr()
        self._read.count = self._head.m = rows.numel()
        try:
            self._run.run(num_tokens, self._embed.target, self._read.source, self._rotation, step)
        except IndexError:
            if not self._rotary.grow(int(positions.max()) + 1):
                raise
            self._point_at_table()
            self._run.run(num_tokens, self._embed.target, self._read.source, self._rotation, step)

    def _point_at_table(self) -> None:
        self._rotate.source, self._rotate.limit = (
            self._rotary.rows.data_ptr(),
            len(self._rotary.rows),
        )

    def _point(self) -> None:
        """Set the addresses of the buffers after they have moved."""
        at, width = self._scratch.at, self._rotary.width
        self._rotate.target = at("rotation")
        self._rotation = Rotation(
            at("rotation"), at("rotation") + width * FLOAT_BYTES, 2 * width, width
        )
        # reused: the layers have read it by then
        self._embed.target = self._read.target = self._head.x = at("in")
        self._read.source = at("out")
        self._head.workspace = at("work")
        self._version = self._scratch.version

    def _can_fuse(self) -> bool:
        return self._layers.can_fuse and not any(
            module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
            for module in self._around
        )


def find_whole_pass(model: nn.Module) -> WholePass | None:
    """Build the whole pass; return None where the model is no such decoder or the logits differ.

    They differ where code between the model's parts changes them.
    """
    found = _built(model)
    if found is None:
        return None
    whole_pass, parts = found
    step = small_step(parts)
    if step is None:
        return None
    try:
        is_equivalent = _is_equivalent(model, whole_pass, step)
    except Exception as error:  # an unusual call: the model stays as it is
        log.debug("The model is called through Transformers, not as one pass: %s", error)
        return None
    return whole_pass if is_equivalent else None


def _built(model: Any) -> tuple[WholePass, list[LayerParts]] | None:
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    layers, norm, rotary = (getattr(base, name, None) for name in ("layers", "norm", "rotary_emb"))
    if (
        not isinstance(layers, LayersAsOne)
        or not isinstance(layers.whole, FusedStack)
        or not isinstance(norm, FusedNorm)
        or not isinstance(rotary, nn.Module)
    ):
        return None
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if (
        not isinstance(head, PackedLinear)
        or getattr(rotary, "rope_type", _CHANGING[0]) in _CHANGING
    ):
        return None
    if type(embed) is not nn.Embedding or embed.max_norm is not None or not is_plain(embed.weight):
        return None
    try:
        table = RotaryTable(rotary)
    except Exception as error:
        log.debug("Rotary tables are not built: %s", error)
        return None
    return WholePass(embed, table, layers.whole, norm, head), layers.whole.parts


@torch.inference_mode()
def _is_equivalent(model: Any, whole_pass: WholePass, step: PagedStep) -> bool:
    """Compare both passes on two prompts of random tokens, for all rows and for some.

    The positions are far apart, and two of them reach the end of the first rotary table.
    """
    metadata = two_prompts(BLOCK_SIZE)
    count = metadata.slot_mapping.numel()
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(
        0, model.get_input_embeddings().weight.shape[0], (count,), generator=generator
    )
    positions = torch.tensor([0, 1, _FIRST_LENGTH - 2, _FIRST_LENGTH - 1, 7])[:count]
    wanted = model(
        input_ids=input_ids[None], position_ids=positions[None], use_cache=False, paged=step
    ).logits[0]
    for rows in (torch.arange(count), torch.tensor([1, count - 1])):
        found = whole_pass(input_ids, positions, rows, step)
        found_argmax = whole_pass.argmax(input_ids, positions, rows, step)
        if found is None or found_argmax is None or not torch.equal(found, wanted[rows]):
            return False
        if not torch.equal(found_argmax[1], wanted[rows].amax(dim=1)):
            return False
    return True
