"""Modules that fit are replaced, by family, and the engine's numbers stay the same."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
)

from tests.support.collecting_engine import CollectingEngine
from tests.support.marks import long_unless
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import EngineConfig
from tokenmill_worker.engines.own.config import EngineConfigError
from tokenmill_worker.engines.own.cpu.fused import Packing, prepare_weights, replace_modules
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError
from tokenmill_worker.engines.own.model.paged_attention import IMPLEMENTATION, register

MODULES = {
    "llama": {
        "FusedLayer": 4,
        "FusedAttention": 4,
        "FusedMLP": 4,
        "FusedNorm": 9,
        "PackedLinear": 1,
    },
    "mistral": {
        "FusedLayer": 4,
        "FusedAttention": 4,
        "FusedMLP": 4,
        "FusedNorm": 9,
        "PackedLinear": 1,
    },
    "qwen2": {
        "FusedLayer": 4,
        "FusedAttention": 4,
        "FusedMLP": 4,
        "FusedNorm": 9,
        "PackedLinear": 1,
    },
    "qwen3": {
        "FusedLayer": 4,
        "FusedAttention": 4,
        "FusedMLP": 4,
        "FusedNorm": 17,
        "PackedLinear": 1,
    },
    "gemma2": {
        "FusedLayer": 4,
        "FusedAttention": 4,
        "FusedMLP": 4,
        "FusedNorm": 17,
        "PackedLinear": 1,
    },
    "gemma3": {
        "FusedLayer": 4,
        "FusedAttention": 4,
        "FusedMLP": 4,
        "FusedNorm": 25,
        "PackedLinear": 1,
    },
    "phi3": {
        "FusedLayer": 4,
        "FusedAttention": 4,
        "FusedMLP": 4,
        "FusedNorm": 9,
        "PackedLinear": 1,
    },
    "phi3_partial": {
        "FusedLayer": 4,
        "FusedAttention": 4,
        "FusedMLP": 4,
        "FusedNorm": 9,
        "PackedLinear": 1,
    },
    "mixtral": {"FusedAttention": 4, "FusedNorm": 9, "PackedLinear": 1},
    "gpt2": {"PackedLinear": 13},
}


pytestmark = pytest.mark.usefixtures("linear_kernels")


def load(folder: Path) -> nn.Module:
    register()
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=IMPLEMENTATION
    )
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("name", MODULES)
def test_fused_modules_replace_the_expected_modules_of_each_family(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    model = load(folder_of(name))
    assert replace_modules(model, Packing.choose(None)) == Counter(MODULES[name])
    assert not [module for module in model.modules() if isinstance(module, nn.Linear)]


def answers(folder: Path, fuse: bool, attention: str) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return ragged prompts' greedy tokens, computed in chunks, and their top log-probabilities."""
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", fuse=fuse,
        attention=attention,  # type: ignore[arg-type]
        block_size=4, num_blocks=200,
        max_num_batched_tokens=24, max_num_seqs=8,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, top_logprobs=20)
    with CollectingEngine.load(config) as engine:
        outputs = engine.generate_batch(
            [list(range(3, 3 + n)) for n in (1, 5, 30, 41)], [params] * 4
        )
    found = []
    for output in outputs:
        assert output.error is None
        assert output.logprobs is not None
        tops = torch.tensor([[value for _, value in one.top] for one in output.logprobs])
        found.append((output.token_ids, tops))
    return found


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("attention", long_unless({"cpu"}, ["reference", "cpu"]))
def test_fused_modules_give_the_same_logits(
    name: str, attention: str, folder_of: Callable[[str], Path]
) -> None:
    plain = answers(folder_of(name), False, "reference")
    fused = answers(folder_of(name), True, attention)
    assert [tokens for tokens, _ in fused] == [tokens for tokens, _ in plain]
    for (_, found), (_, wanted) in zip(fused, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class NormWithBias(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = super().forward(hidden_states)
        return out + 0.01


class NormWithItsOwnEps(LlamaRMSNorm):
    """Differs from the fused module only in rows that are nearly zero."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 4 * self.variance_epsilon)
        return self.weight * hidden_states * scale


class ClampedMLP(LlamaMLP):
    """Differs from the fused module only in large rows."""

    def forward(self, x: Tensor) -> Tensor:
        product = self.act_fn(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x)
        out: Tensor = self.down_proj(product)
        return out


class ExactGeluMLP(LlamaMLP):
    """Its activation is another one than its name says."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))
        return out


class ClippedAttention(LlamaAttention):
    """Differs from the fused module only in large hidden states."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states.clamp(-8.0, 8.0), *args, **kwargs)


class RepeatingAttention(LlamaAttention):
    """Computes the right queries, keys and values, and another output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return out * 1.01, weights


class ScaledLayer(LlamaDecoderLayer):
    """Puts the right parts together in another way."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(hidden_states, *args, **kwargs)
        return hidden_states + 0.99 * (out - hidden_states)


class TupleLayer(LlamaDecoderLayer):
    """Returns the right numbers in another form."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (super().forward(*args, **kwargs),)


class BiasedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-3


@pytest.mark.parametrize(
    ("twist", "path", "kind"),
    [
        (NormWithBias, "model.norm", "FusedNorm"),
        (NormWithItsOwnEps, "model.norm", "FusedNorm"),
        (ClampedMLP, "model.layers.1.mlp", "FusedMLP"),
        (ExactGeluMLP, "model.layers.1.mlp", "FusedMLP"),
        (ClippedAttention, "model.layers.2.self_attn", "FusedAttention"),
        (RepeatingAttention, "model.layers.2.self_attn", "FusedAttention"),
        (ScaledLayer, "model.layers.3", "FusedLayer"),
        (TupleLayer, "model.layers.3", "FusedLayer"),
        (BiasedLinear, "lm_head", "PackedLinear"),
    ],
)
def test_a_module_that_computes_something_else_is_not_replaced(
    twist: type[nn.Module], path: str, kind: str, folder_of: Callable[[str], Path]
) -> None:
    model = load(folder_of("llama"))
    twisted = model.get_submodule(path)
    twisted.__class__ = twist
    replaced = replace_modules(model, Packing.choose(None))
    assert model.get_submodule(path) is twisted
    assert replaced[kind] == MODULES["llama"][kind] - 1
    inside_a_layer = path.startswith("model.layers")
    assert replaced["FusedLayer"] == MODULES["llama"]["FusedLayer"] - inside_a_layer, (
        "a layer needs all of its parts"
    )


def test_an_mlp_with_an_unknown_activation_is_not_replaced(
    folder_of: Callable[[str], Path],
) -> None:
    model = load(folder_of("llama"))
    model.get_submodule("model.layers.0.mlp").act_fn = nn.ReLU()
    replaced = replace_modules(model, Packing.choose(None))
    assert replaced["FusedMLP"] == 3
    assert replaced["PackedLinear"] == 4, "its three products and the head"


def test_without_a_compiler_no_module_is_replaced(
    folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    def no_kernels(*_: object) -> Packing:
        raise KernelUnavailableError("no C++ compiler found (looked for g++)")

    model = load(folder_of("llama"))
    before = {name: type(module) for name, module in model.named_modules()}
    config = EngineConfig(model="llama", dtype="float32", device="cpu")
    with caplog.at_level(logging.INFO):
        assert prepare_weights(model, config, no_kernels) is model
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert [record.getMessage() for record in caplog.records] == [
        "The model runs on torch's own linear layers, which is slower: "
        "no C++ compiler found (looked for g++)"
    ]
    with pytest.raises(EngineConfigError, match="quantization 'int8' needs compiled kernels: no C"):
        prepare_weights(model, config.replace(quantization="int8"), no_kernels)


def test_modules_are_replaced_only_in_float32_with_fuse(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("llama")).to(torch.bfloat16)
    before = {name: type(module) for name, module in model.named_modules()}
    prepare_weights(model, EngineConfig(model="llama"))
    prepare_weights(model.float(), EngineConfig(model="llama", fuse=False))
    assert {name: type(module) for name, module in model.named_modules()} == before
    with pytest.raises(
        EngineConfigError,
        match=r"'int4' runs on the CPU, in float32, not on cpu in bfl",
    ):
        prepare_weights(model.to(torch.bfloat16), EngineConfig(model="llama", quantization="int4"))
