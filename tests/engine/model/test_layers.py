"""Layer groups from what a probing pass saw, and the refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worker.engine.attention import AttentionShape
from worker.engine.config import EngineConfigError
from worker.engine.model.layers import describe_layers, group_layers
from worker.engine.model.paged import LayerTrait, Probe

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)


def trait(window: int | None = None, extras: tuple[str, ...] = (), value_dim: int = 16, heads: int = 2) -> LayerTrait:
    shape = AttentionShape(4, heads, 16, 0.25)
    return LayerTrait(shape, value_dim, window, frozenset(extras))


def describe(traits: list[LayerTrait], **config: Any) -> list[LayerTrait]:
    settings = SimpleNamespace(**{"num_hidden_layers": len(traits), **config})
    return describe_layers(Probe(layers=dict(enumerate(traits))), settings, "some-model")


def test_layers_that_keep_their_cache_alike_share_a_group() -> None:
    groups = group_layers([trait(8), trait(8), trait(), trait(8), trait(), trait(heads=1)])
    assert [(group.layers, group.window, group.num_kv_heads) for group in groups] == [
        ((0, 1, 3), 8, 2),
        ((2, 4), None, 2),
        ((5,), None, 1),
    ]


def test_a_window_that_only_the_configuration_knows_is_taken_from_it() -> None:
    types = ["full_attention", "sliding_attention"]
    assert [t.window for t in describe([trait(), trait()], sliding_window=9, layer_types=types)] == [None, 9]
    assert [t.window for t in describe([trait(), trait()], sliding_window=9)] == [9, 9]
    assert [t.window for t in describe([trait()], sliding_window=9, use_sliding_window=False)] == [None]


@pytest.mark.parametrize(
    ("traits", "config", "words"),
    [
        ([trait(extras=("position_bias",))], {}, "layer 0 needs a bias on attention logits"),
        ([trait(), trait(value_dim=8)], {}, "layer 1 has keys of size 16 but values of size 8"),
        ([trait()], {"num_hidden_layers": 3}, "2 of its 3 layers do not go through"),
        ([trait(7)], {"sliding_window": 9}, "asks for a window of 7 tokens, its configuration says 9"),
        ([trait()], {"layer_types": ["linear_attention"]}, "layers are of type linear_attention"),
    ],
)
def test_what_the_cache_cannot_keep_is_refused_in_one_sentence(
    traits: list[LayerTrait], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineConfigError) as caught:
        describe(traits, **config)
    assert words in str(caught.value)
    assert "some-model" in str(caught.value)


def test_a_layer_whose_attention_runs_twice_is_refused() -> None:
    probe = Probe(layers={0: trait()}, repeated={0})
    with pytest.raises(EngineConfigError, match="layer 0 runs its attention more than once"):
        describe_layers(probe, SimpleNamespace(num_hidden_layers=1), "some-model")
