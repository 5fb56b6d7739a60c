"""Layers that run as one call, and the whole pass as one: the bits of the model's own code, and
when it is not used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engines.own.cpu.fused.test_layers import MODULES, load
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.attention import AttentionMetadata, AttentionShape
from tokenmill_worker.engines.own.cpu.attention import CpuAttention
from tokenmill_worker.engines.own.cpu.fused import (
    Packing,
    find_whole_pass,
    prepare_weights,
    replace_modules,
)
from tokenmill_worker.engines.own.cpu.fused.layer import FusedLayer
from tokenmill_worker.engines.own.cpu.fused.layer_matching import small_step
from tokenmill_worker.engines.own.cpu.fused.modules import FusedAttention
from tokenmill_worker.engines.own.model.paged_attention import LayerBinding, PagedStep

pytestmark = pytest.mark.usefixtures("linear_kernels")


def packed_as(lens: tuple[int, ...], block_size: int = 4) -> AttentionMetadata:
    """Make the metadata of prompts of these lengths, in blocks from 1 on."""
    starts = [0, *itertools.accumulate(lens)]
    widths = [-(-length // block_size) for length in lens]
    firsts = [1 + sum(widths[:index]) for index in range(len(lens))]
    slots = [
        block_size * first + place
        for first, length in zip(firsts, lens, strict=True)
        for place in range(length)
    ]
    tables = [
        [first + min(place, width - 1) for place in range(max(widths))]
        for first, width in zip(firsts, widths, strict=True)
    ]
    return AttentionMetadata(
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.tensor(tables, dtype=torch.int32), slot_mapping=torch.tensor(slots),
        max_query_len=max(lens),
        max_seq_len=max(lens), block_size=block_size, window=None, query_lens_host=lens,
        seq_lens_host=lens,
    )  # fmt: skip


@torch.inference_mode()
def through_layers(
    layers: Iterable[nn.Module],
    hidden: Tensor,
    groups: tuple[int, ...] = (0, 0, 0, 0),
    rows: Tensor | None = None,
) -> Tensor:
    """Run `hidden` through the layers in one paged step.

    Every row is a sequence of its own in layer group 0; all rows are one sequence in group 1.
    """
    count = hidden.shape[1]
    backend = CpuAttention()
    cache = torch.zeros(count + 1, 2, *backend.block_shape(4, 2, 16))
    shape = AttentionShape(4, 2, 16, 0.25)
    bindings = {index: LayerBinding(group, cache, shape) for index, group in enumerate(groups)}
    step = PagedStep(backend, bindings, (packed_as((1,) * count), packed_as((count,))), rows)
    tables = torch.ones(1, count, 16), torch.zeros(1, count, 16)
    for layer in layers:
        hidden = layer(hidden, position_embeddings=tables, paged=step)
    return hidden


def test_a_row_has_the_same_bits_in_every_batch_and_with_any_number_of_threads(
    folder_of: Callable[[str], Path],
) -> None:
    """Bit by bit, through whole layers whose buffers grow, with the smallest batch after the
    largest.
    """
    model = prepare_weights(load(folder_of("qwen3")), EngineConfig(model="qwen3", device="cpu"))
    hidden = torch.randn(1, 40, 64)
    threads = torch.get_num_threads()
    try:
        found = {}
        for count, num_threads in ((40, 1), (40, 3), (7, 2), (1, 1), (1, 2)):
            torch.set_num_threads(num_threads)
            layers = model.get_submodule("model.layers")[:]  # type: ignore[index]
            found[count, num_threads] = through_layers(layers, hidden[:, :count])
    finally:
        torch.set_num_threads(threads)
    for (count, _), rows in found.items():
        assert torch.equal(rows, found[40, 1][:, :count])


def test_attributes_of_a_replaced_layer_are_readable_on_its_replacement(
    folder_of: Callable[[str], Path],
) -> None:
    model = prepare_weights(load(folder_of("llama")), EngineConfig(model="llama", device="cpu"))
    layer: Any = model.get_submodule("model.layers.0")
    assert isinstance(layer, FusedLayer)
    assert layer.hidden_size == 64
    with pytest.raises(AttributeError):
        layer.no_such_thing  # noqa: B018


@pytest.mark.parametrize(
    ("family", "rows"), [("llama", 1), ("qwen3", 1), ("gemma2", 4), ("gemma3", 4)]
)
def test_layers_called_with_the_same_arguments_run_as_one_call(
    family: str, rows: int, folder_of: Callable[[str], Path]
) -> None:
    """Families whose layers differ by their type get each layer by itself."""
    model = prepare_weights(load(folder_of(family)), EngineConfig(model=family, device="cpu"))
    layers: Any = model.get_submodule("model.layers")
    assert len(layers) == 4
    assert len(layers[:4]) == rows
    assert [
        name for name, module in model.named_modules() if isinstance(module, FusedAttention)
    ] == [f"model.layers.{index}.layer.self_attn" for index in range(4)]


@pytest.mark.parametrize("groups", [(0, 1, 0, 1), (1, 0, 0, 0), (1, 1, 1, 1)])
def test_layers_of_several_groups_in_one_call_read_their_own_group(
    groups: tuple[int, ...], folder_of: Callable[[str], Path]
) -> None:
    model = prepare_weights(load(folder_of("llama")), EngineConfig(model="llama", device="cpu"))
    layers: Any = model.get_submodule("model.layers")
    hidden = torch.randn(1, 9, 64)
    in_turn = through_layers(list(layers), hidden, groups)
    assert not torch.allclose(in_turn, through_layers(list(layers), hidden))
    assert torch.equal(through_layers(layers[:], hidden, groups), in_turn)
    last = through_layers(layers[:], hidden, groups, torch.tensor([3, 8]))
    assert torch.equal(last[:, [3, 8]], in_turn[:, [3, 8]])


def test_layers_run_as_one_call_give_the_bits_of_layers_run_in_turn(
    folder_of: Callable[[str], Path],
) -> None:
    model = prepare_weights(load(folder_of("qwen3")), EngineConfig(model="qwen3", device="cpu"))
    layers: Any = model.get_submodule("model.layers")
    hidden = torch.randn(1, 9, 64)
    in_turn = through_layers(list(layers), hidden)
    assert torch.equal(through_layers(layers[:], hidden), in_turn)
    for layer in layers:
        layer.can_fuse = False
    assert torch.allclose(through_layers(layers[:], hidden), in_turn, atol=1e-5)
    layers[2].layer.mlp.down = None  # the parts themselves run now: one that is broken is noticed
    with pytest.raises(TypeError):
        through_layers(layers[:], hidden)


WHOLE_PASS = {"llama", "mistral", "qwen2", "qwen3", "phi3", "phi3_partial"}


@pytest.mark.parametrize("name", MODULES)
def test_the_whole_pass_gives_the_model_s_logits_bit_for_bit(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    """The whole pass gives the model's logits bit for bit, also beyond the first rotary tables."""
    model: Any = load(folder_of(name))
    replace_modules(model, Packing.choose(None))
    whole_pass = find_whole_pass(model)
    assert (whole_pass is not None) == (name in WHOLE_PASS), name
    if whole_pass is None:
        return
    layers: Any = model.get_submodule("model.layers")
    step = small_step([layer.parts for layer in layers])
    assert step is not None
    input_ids, positions = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([3, 9000, 4, 20_000, 1])
    with torch.inference_mode():
        wanted = model(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, paged=step
        ).logits[0]
        for rows in (torch.arange(5), torch.tensor([4])):
            found = whole_pass(input_ids, positions, rows, step)
            assert found is not None
            assert torch.equal(found, wanted[rows])
            found_argmax = whole_pass.argmax(input_ids, positions, rows, step)
            assert found_argmax is not None
            assert torch.equal(found_argmax[0], wanted[rows].argmax(dim=1))
            assert torch.equal(found_argmax[1], wanted[rows].amax(dim=1))
        with pytest.raises(IndexError):
            whole_pass(
                torch.tensor([5, 6, 7, 8, model.config.vocab_size]),
                positions,
                torch.tensor([4]),
                step,
            )
        again = whole_pass(input_ids, positions, torch.arange(5), step)
        assert again is not None
        assert torch.equal(again, wanted)
        for part in (
            model.get_input_embeddings(),
            model.get_submodule("model.norm"),
            model.get_output_embeddings(),
        ):
            hook = part.register_forward_hook(lambda *_: None)
            assert whole_pass(input_ids, positions, torch.tensor([4]), step) is None, (
                "somebody looks at a part"
            )
            hook.remove()
        layers[1].can_fuse = False
        assert whole_pass(input_ids, positions, torch.tensor([4]), step) is None, (
            "somebody is between its parts"
        )
        layers[1].can_fuse = True
        assert whole_pass(input_ids, positions, torch.tensor([4]), step) is not None


def test_a_model_that_changes_its_logits_gets_no_whole_pass(
    folder_of: Callable[[str], Path],
) -> None:
    model: Any = load(folder_of("llama"))
    replace_modules(model, Packing.choose(None))
    original = model.forward

    def halved(**kwargs: Any) -> Any:
        out = original(**kwargs)
        out.logits = out.logits / 2
        return out

    model.forward = halved
    assert find_whole_pass(model) is None
    model.forward = original
    assert find_whole_pass(model) is not None
    model.get_submodule("model.rotary_emb").rope_type = "dynamic"
    assert find_whole_pass(model) is None, "whose tables depend on the longest sequence"
