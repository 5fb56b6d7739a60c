"""Layer groups from what a probing pass saw, and the refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from tokenmill_worker.engines.own.attention import AttentionShape
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.model import probe as probing
from tokenmill_worker.engines.own.model.layer_groups import (
    LayerKind,
    Layers,
    describe_layers,
    group_layers,
)
from tokenmill_worker.engines.own.model.paged_attention import LayerTrait, Probe, mask_code_of

CAUSAL, NOT_CAUSAL = -1.0, 1.0


def kind(window: Window | None = None, heads: int = 2) -> LayerKind:
    return LayerKind(AttentionShape(4, heads, 16, 0.25), window)


def trait(code: float | None = CAUSAL, extras: tuple[str, ...] = ()) -> LayerTrait:
    return LayerTrait(AttentionShape(4, 2, 16, 0.25), code, frozenset(extras))


def describe(traits: list[LayerTrait], length: int = 100, **config: Any) -> Layers:
    settings = SimpleNamespace(**{"num_hidden_layers": len(traits), **config})
    return describe_layers(Probe(layers=dict(enumerate(traits))), settings, "some-model", length)


def windows(layers: Layers) -> list[Window | None]:
    return [layer.window for layer in layers if layer is not None]


def test_layers_with_the_same_window_and_heads_share_a_group() -> None:
    near, chunk = Window(8), Window(8, is_chunked=True)
    groups = group_layers([kind(near), kind(chunk), kind(), kind(near), kind(), kind(heads=1)])
    assert [(group.layers, group.window, group.num_kv_heads) for group in groups] == [
        ((0, 3), near, 2),
        ((1,), chunk, 2),
        ((2, 4), None, 2),
        ((5,), None, 1),
    ]


def test_a_layer_s_window_is_that_of_its_mask() -> None:
    types = ["full_attention", "sliding_attention"]
    found = describe([trait(), trait(mask_code_of(Window(9)))], sliding_window=9, layer_types=types)
    assert windows(found) == [None, Window(9)]
    assert windows(describe([trait()], sliding_window=9, use_sliding_window=False)) == [None]


def test_a_configured_window_without_a_mask_bounds_the_context() -> None:
    assert windows(describe([trait()], length=9, sliding_window=9)) == [None]
    with pytest.raises(
        EngineConfigError,
        match="window of 9 tokens that layer 0 does not build: set max_model_len to",
    ):
        describe([trait(), trait()], length=10, sliding_window=9)


@pytest.mark.parametrize("window", [1, 2, 7, 4096])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_window_is_read_from_a_mask(window: int, is_chunked: bool) -> None:
    function = (
        chunked_causal_mask_function(window, torch.zeros(1, dtype=torch.int64))
        if is_chunked
        else sliding_window_causal_mask_function(window)
    )
    mask = probing._coded_mask(1, 2, 2, function, local_size=window)
    code = probing.mask_code(nn.Module(), mask[:, :, :1])
    assert code is not None
    assert probing.is_served(code)
    assert probing.window_of(code) == Window(window, is_chunked and window > 1)
    full = probing.mask_code(nn.Module(), probing._coded_mask(1, 2, 2, causal_mask_function))
    assert full is not None
    assert probing.is_served(full)
    assert probing.window_of(full) is None


@pytest.mark.parametrize(
    ("mask_function", "size"),
    [
        (lambda _batch, _head, query, key: key >= 0 * query, None),
        (lambda _batch, _head, query, key: (key <= query) | (query == 1), None),
        (chunked_causal_mask_function(4, torch.ones(1, dtype=torch.int64)), 4),
        (sliding_window_causal_mask_function(5), 4),
    ],
)
def test_masks_other_than_causal_windows_have_no_window(
    mask_function: Any, size: int | None
) -> None:
    code = probing.mask_code(
        nn.Module(), probing._coded_mask(1, 2, 2, mask_function, local_size=size)
    )
    assert code is not None
    assert not probing.is_served(code)


def test_a_mask_function_gets_positions_on_the_models_device() -> None:
    def function(_batch: int, _head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen.update((query.device.type, key.device.type))
        return torch.ones(query.shape[0], key.shape[1], dtype=torch.bool)

    seen: set[str] = set()
    probing._coded_mask(1, 2, 2, function, device="meta")
    assert seen == {"meta"}


def test_a_mask_built_by_the_model_is_distinguished_from_a_given_one() -> None:
    own = torch.zeros(1, 1, 2, 2)
    own[..., 0, 1] = torch.finfo(torch.float32).min
    given = probing._coded_mask(1, 2, 2, causal_mask_function)
    for mask in (own, own[..., :1], own.bool(), given + torch.rand(2), given * 0.5):
        assert probing.mask_code(nn.Module(), mask) is None


@pytest.mark.parametrize(
    ("traits", "config", "words"),
    [
        ([trait(extras=("position_bias",))], {}, "layer 0 needs a bias on attention logits"),
        ([trait()], {"num_hidden_layers": 3}, "2 of its 3 layers do not go through"),
        ([trait()] * 3, {"num_hidden_layers": 2}, "3 layers attend, its configuration says 2"),
        (
            [trait(), trait(NOT_CAUSAL)],
            {},
            "layer 1 has an attention mask that is not causal, sliding or chunked",
        ),
        ([trait(None)], {}, "layer 0 makes an attention mask of its own"),
        ([trait()], {"layer_types": ["linear_attention"]}, "layers are of type linear_attention"),
    ],
)
def test_layers_that_the_cache_cannot_serve_are_refused_in_one_sentence(
    traits: list[LayerTrait], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineConfigError) as caught:
        describe(traits, **config)
    assert words in str(caught.value)
    assert "some-model" in str(caught.value)


def test_a_reason_shared_by_several_layers_is_given_once() -> None:
    with pytest.raises(EngineConfigError) as caught:
        describe([trait(None)] * 4)
    assert caught.value.problems == [
        "some-model cannot be served: layer 0 makes an attention mask of its own"
    ]


def test_a_layer_whose_attention_runs_twice_is_refused() -> None:
    probe = Probe(layers={0: trait()}, repeated={0})
    with pytest.raises(EngineConfigError, match="layer 0 runs its attention more than once"):
        describe_layers(probe, SimpleNamespace(num_hidden_layers=1), "some-model", 100)
