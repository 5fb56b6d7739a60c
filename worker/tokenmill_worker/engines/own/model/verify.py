"""Compares a loaded model's logits in the engine's steps with its own forward pass of each prompt
alone.

Three prompts arrive in chunks of unlike lengths, then one decodes while the others continue. The
model is compared as Transformers built it, in float32, before any module is replaced. Of all but
tiny models the first layers are compared, down to one of each kind. `of_all_layers` keeps one
prompt's logits of the whole model, which the fused pass is compared with.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention import AttentionBackend, AttentionMetadata
from tokenmill_worker.engines.own.attention.reference import ReferenceAttention
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.model import recurrent_layers
from tokenmill_worker.engines.own.model.layer_groups import Layers, group_layers, shapes_of
from tokenmill_worker.engines.own.model.paged_attention import (
    AttentionStep,
    LayerBinding,
    PagedStep,
    bind_layers,
)
from tokenmill_worker.engines.own.model.probe import OWN, attending_with, failed
from tokenmill_worker.engines.own.model.recurrent_states import StatePool
from tokenmill_worker.engines.own.model.shortened import TOLERANCE, first_layers, in_float32

_LENGTHS = (7, 18, 11)
_DECODES = 2  # number of the prompt whose last token comes as a decode
_MAX_WINDOW = 64  # prompts are longer than smaller windows; longer ones would take too much time
_MAX_WHOLE_WEIGHTS = 600_000_000  # beyond this, its fused pass is not compared
_SEEDS = (11, 12)  # a router may decide a near tie otherwise: a difference counts with both alone


class Forward(Protocol):
    """Computes logits `[num_rows, vocab]` of packed tokens at `rows`."""

    def __call__(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, step: AttentionStep
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens `start` to `stop` of a prompt; `kind` names the chunk in an error."""

    prompt: int
    start: int
    stop: int
    kind: str

    @property
    def compared(self) -> list[int]:
        """Return the positions whose logits are compared."""
        return sorted({self.start, self.stop - 1})


@dataclass(frozen=True, slots=True)
class Expected:
    """Prompts `[length]`, the steps that feed them, and the model's own logits by prompt and
    position.
    """

    prompts: tuple[Tensor, ...]
    steps: tuple[tuple[PromptChunk, ...], ...]
    logits: dict[tuple[int, int], Tensor]


@torch.inference_mode()
def verify(
    model: Any, forward: Forward, layers: Layers, name: str, max_length: int
) -> tuple[Expected, ...]:
    """Check the engine's steps; return the expected logits of the model's own pass, for
    `difference`.

    Returns () where only the first layers were compared. Raises EngineConfigError where the logits
    differ with every seed.
    """
    expected = []
    with first_layers(model, layers) as depth, in_float32(model) as tolerance:
        tolerance = max(tolerance, least_tolerance(model))
        for seed in _SEEDS:
            expected.append(_expected(model, layers[:depth], name, max_length, seed))
            try:
                found = difference(
                    expected[-1], forward, layers[:depth], ReferenceAttention(), tolerance=tolerance
                )
            except Exception as error:
                raise failed(name, error) from error
            if found is None:
                return tuple(expected) if depth == len(layers) else ()
    raise EngineConfigError([
        f"{name} cannot be served: in steps of several sequences its logits differ from those of "
        "its own forward pass: "
        f"{found}"
    ])  # fmt: skip


def least_tolerance(model: Any) -> float:
    """Return the tolerance of logits in float32: larger where the model's own passes differ."""
    return recurrent_layers.TOLERANCE if recurrent_layers.is_recurrent(model) else TOLERANCE


@torch.inference_mode()
def of_all_layers(model: Any, layers: Layers, name: str, max_length: int) -> tuple[Expected, ...]:
    """Return the logits of the whole model's own pass for the prompt that decodes; () for a model
    that is too large.
    """
    if sum(p.numel() for p in model.parameters()) > _MAX_WHOLE_WEIGHTS:
        return ()
    return (_expected(model, layers, name, max_length, _SEEDS[0], of=(_DECODES,)),)


@torch.inference_mode()
def difference(
    expected: Expected,
    forward: Forward,
    layers: Layers,
    backend: AttentionBackend,
    block_size: int = 16,
    tolerance: float = TOLERANCE,
) -> str | None:
    """Return where the steps' logits differ from the expected ones and by how much, or None if they
    agree.
    """
    device = expected.prompts[0].device
    num_blocks = -(-max(len(prompt) for prompt in expected.prompts) // block_size)
    groups = group_layers(layers)
    bindings = with_empty_caches(
        layers, backend, 1 + num_blocks * len(expected.prompts), block_size, device
    )
    states = StatePool(len(expected.prompts), device)
    for chunks in expected.steps:
        metadata = tuple(
            metadata_of(chunks, group.window, num_blocks, block_size, device) for group in groups
        )
        tokens = torch.cat(
            [expected.prompts[chunk.prompt][chunk.start : chunk.stop] for chunk in chunks]
        )
        positions = torch.cat(
            [torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks]
        )
        starts = metadata[0].query_start.tolist()
        places = [
            (chunk, at)
            for chunk in chunks
            for at in chunk.compared
            if (chunk.prompt, at) in expected.logits
        ]
        rows = [starts[chunks.index(chunk)] + position - chunk.start for chunk, position in places]
        row_tensor = torch.tensor(rows, device=device)
        recurrence = states.step(
            [chunk.prompt for chunk in chunks],
            [chunk.stop - chunk.start for chunk in chunks],
            [chunk.stop for chunk in chunks],
        )
        step = PagedStep(backend, bindings, metadata, row_tensor, recurrence)
        logits = forward(tokens, positions, row_tensor, step)
        for (chunk, position), row in zip(places, logits.float(), strict=True):
            wanted = expected.logits[chunk.prompt, position]
            share = float(
                (row - wanted).abs().max() / (wanted - wanted.mean()).abs().max().clamp_min(1e-12)
            )
            if not share <= tolerance:  # NaN too
                return f"{chunk.kind}, at position {position}, by {share:.2g} of their range"
    return None


# ── the steps ──


def with_empty_caches(
    layers: Layers,
    backend: AttentionBackend,
    num_blocks: int,
    block_size: int,
    device: torch.device,
) -> dict[int, LayerBinding]:
    """Return bindings of the layers to caches of their own, of float32 zeros."""
    groups = group_layers(layers)

    def cache(group: int, _: int) -> Tensor:
        shape = backend.block_shape(block_size, groups[group].num_kv_heads, groups[group].head_dim)
        return torch.zeros(num_blocks, 2, *shape, device=device)

    return bind_layers(groups, shapes_of(layers), cache)


def _steps(lengths: Sequence[int]) -> tuple[tuple[PromptChunk, ...], ...]:
    """Return two steps: first chunks, then the last prompt's last token beside the longer rests of
    the others.
    """
    starts = (lengths[0] // 3, lengths[1] // 2, lengths[2] - 1)
    first = [
        PromptChunk(i, 0, start, "the first chunk of a prompt")
        for i, start in enumerate(starts)
        if start
    ]
    rest = [
        PromptChunk(
            i,
            starts[i],
            lengths[i],
            "a decode" if i == _DECODES and starts[i] else "a later chunk of a prompt",
        )
        for i in (_DECODES, 0, 1)
    ]
    return tuple(tuple(chunks) for chunks in (first, rest) if chunks)


def metadata_of(
    chunks: Sequence[PromptChunk],
    window: Window | None,
    num_blocks: int,
    block_size: int,
    device: torch.device,
) -> AttentionMetadata:
    """Return metadata in which each prompt has blocks of its own, in descending order."""
    tables = [
        [(1 + chunk.prompt) * num_blocks - index for index in range(num_blocks)] for chunk in chunks
    ]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for chunk, table in zip(chunks, tables, strict=True)
        for position in range(chunk.start, chunk.stop)
    ]
    query_lens = tuple(chunk.stop - chunk.start for chunk in chunks)
    seq_lens = tuple(chunk.stop for chunk in chunks)

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return AttentionMetadata(
        query_start=ints([0, *itertools.accumulate(query_lens)]), seq_lens=ints(seq_lens),
        block_table=ints(tables),
        slot_mapping=ints(slots, torch.int64), max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=block_size, window=window, query_lens_host=query_lens, seq_lens_host=seq_lens,
    )  # fmt: skip


# ── the model's own pass ──


def _expected(
    model: Any,
    layers: Layers,
    name: str,
    max_length: int,
    seed: int,
    of: Sequence[int] = (0, 1, 2),
) -> Expected:
    """All prompts, and the logits of the ones numbered in `of`."""
    windows = (layer.window.size for layer in layers if layer and layer.window)
    past = max((window for window in windows if window <= _MAX_WINDOW), default=0)
    lengths = [min(length + past, max_length) for length in _LENGTHS]
    steps = _steps(lengths)
    prompts = random_prompts(model, lengths, seed)
    logits: dict[tuple[int, int], Tensor] = {}
    try:
        with attending_with(model, OWN, name):
            for number in of:
                chunks = [chunk for step in steps for chunk in step if chunk.prompt == number]
                positions = sorted({position for chunk in chunks for position in chunk.compared})
                rows = _own_logits(model, prompts[number], positions)
                logits |= {
                    (number, position): row for position, row in zip(positions, rows, strict=True)
                }
    except Exception as error:
        raise EngineConfigError([
            f"{name} cannot be served: its own forward pass fails ({type(error).__name__}: "
            f"{str(error)[:160]})"
        ]) from error  # fmt: skip
    return Expected(prompts, steps, logits)


def _own_logits(model: Any, prompt: Tensor, positions: list[int]) -> Tensor:
    """Run the model as `generate` does, but without a cache; return float32 logits at
    `positions`.
    """
    known = inspect.signature(model.forward).parameters
    rows = torch.tensor(positions, device=prompt.device)
    inputs = {
        "attention_mask": torch.ones_like(prompt)[None],
        "position_ids": torch.arange(len(prompt), device=prompt.device)[None],
        "logits_to_keep": rows,
    }
    inputs = {name: value for name, value in inputs.items() if name in known}
    logits: Tensor = model(input_ids=prompt[None], use_cache=False, **inputs).logits[0]
    return (logits if "logits_to_keep" in inputs else logits[rows]).float()


def random_prompts(model: Any, lengths: Sequence[int], seed: int) -> tuple[Tensor, ...]:
    """Return prompts of random tokens, without those that the configuration names."""
    config, device = model.config, next(model.parameters()).device
    parts = [config.to_dict(), config.get_text_config().to_dict()]
    special = {v for part in parts for k, v in part.items() if "token" in k and isinstance(v, int)}
    size = int(config.get_text_config().vocab_size)
    usable = torch.tensor(
        [token for token in range(min(size, 4096)) if token not in special] or [0]
    )
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        usable[torch.randint(len(usable), (length,), generator=generator)].to(device)
        for length in lengths
    )
