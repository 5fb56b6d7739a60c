"""Loading refuses models for which the engine would give other tokens than `generate`.

Fused modules that give wrong rows fall back to Transformers' own modules.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ops.model_families import small, trial
from tokenmill_worker.engines.own.attention import AttentionShape
from tokenmill_worker.engines.own.attention.reference import ReferenceAttention
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.model import probe, shortened, verify
from tokenmill_worker.engines.own.model.layer_groups import LayerKind
from tokenmill_worker.engines.own.model.loader import describe_model, load_model


def config(folder: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "fuse": False,
        "max_model_len": 128,
    }
    return EngineConfig(model=str(folder), **{**settings, **changes})


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(EngineConfigError) as caught:
        load_model(folder, config(folder, **changes), CpuDevice())
    assert len(caught.value.problems) == 1
    sentence = caught.value.problems[0].replace(str(folder), "MODEL")
    assert len(sentence) < 300
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("family", "setting", "words"),
    [
        ("bart", "", "its forward takes no position_ids"),
        ("marian", "", "its forward takes no position_ids"),
        (
            "moshi",
            "",
            "a window of 8 tokens that layer 0 does not build: set max_model_len to at most 8",
        ),
        ("doge", "", "layer 0 makes an attention mask of its own"),
        ("bert", "", "layer 0 has an attention mask that is not causal, sliding or chunked"),
        (
            "gemma3_text",
            "bidirectional",
            "layer 0 has an attention mask that is not causal, sliding or chunked",
        ),
        ("xglm", "", "XGLMForCausalLM does not go through Transformers' AttentionInterface"),
    ],
)
def test_a_family_with_wrong_tokens_is_refused_in_one_sentence(
    family: str, setting: str, words: str, tmp_path: Path
) -> None:
    small.build(family, setting).save_pretrained(tmp_path)
    assert words in refusal(tmp_path)


def test_a_class_that_is_not_a_causal_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 16,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    transformers.T5Config(**sizes).save_pretrained(tmp_path)
    assert refusal(tmp_path) == (
        "MODEL cannot be loaded as a causal language model: "
        "Transformers has no causal language model for this configuration"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("stablelm", ""),
        ("nemotron", ""),
        ("hunyuan_v1_moe", ""),
        ("longcat_flash", ""),
        ("granitemoehybrid", "full layers only"),
        ("deepseek_v2", "smaller values"),
        ("deepseek_v3", "smaller values"),
        ("glm4_moe_lite", ""),
        ("mimo_v2_flash", "window"),
        ("nemotron_h", ""),  # Mamba-2, attention, experts
        ("jamba", ""),  # Mamba, whose pass over several tokens reads no state
    ],
)
def test_a_formerly_refused_family_gives_generate_s_tokens(family: str, setting: str) -> None:
    found = trial.run(family, setting)
    assert (found.outcome, found.reason) == ("equal", "")


# ── the comparison of logits ──


def add_to_rows(model: nn.Module, twist: Callable[[int], torch.Tensor]) -> None:
    """Change what the last norm gives in a way that no probe of the layers sees."""
    norm = model.get_submodule("model.norm")
    norm.register_forward_hook(lambda _m, _a, out: out + 0.1 * twist(out.shape[1])[None, :, None])


def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=probe.OWN
    )


def test_rows_that_depend_on_their_place_in_the_step_are_refused(llama: Path) -> None:
    model = plain(llama)
    add_to_rows(model, lambda count: torch.arange(count) % 3)
    with pytest.raises(
        EngineConfigError,
        match=r"its logits differ from those of its own forward pass: .* at position",
    ):
        describe_model(model, llama, config(llama), CpuDevice())


def test_the_comparison_can_be_turned_off(llama: Path) -> None:
    model = plain(llama)
    add_to_rows(model, lambda count: torch.arange(count) % 3)
    assert describe_model(model, llama, config(llama, verify_model=False), CpuDevice()).vocab_size


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_a_correct_model_differs_by_float_noise_only(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    found = verified(folder_of(name), tolerance=1e-4)
    assert found is None


def verified(
    folder: Path, *windows: Window | None, tolerance: float = shortened.TOLERANCE
) -> str | None:
    """Return the difference found with this window in all layers; none given: the model's own."""
    loaded = load_model(folder, config(folder, verify_model=False), CpuDevice())
    by_layer = {index: group.window for group in loaded.groups for index in group.layers}
    own = [LayerKind(shape, by_layer[index]) for index, shape in loaded.shapes.items()]
    layers = [LayerKind(layer.shape, *windows) for layer in own] if windows else own
    expected = verify._expected(loaded.model, own, "some-model", 128, seed=1)
    return verify.difference(
        expected, loaded.logits, layers, ReferenceAttention(), tolerance=tolerance
    )


@pytest.mark.parametrize("window", [None, Window(10), Window(12), Window(11, True)])
def test_a_window_that_is_off_by_one_is_detected(
    window: Window | None, folder_of: Callable[[str], Path]
) -> None:
    assert verified(folder_of("mistral"), Window(11)) is None
    difference = verified(folder_of("mistral"), window)
    assert difference is not None
    assert difference.startswith(("a decode", "a later chunk", "the first chunk"))


def test_a_model_with_a_short_context_is_verified(llama: Path) -> None:
    for length in (1, 2, 5):
        assert (
            load_model(llama, config(llama, max_model_len=length), CpuDevice()).max_model_len
            == length
        )


def test_a_large_model_is_compared_by_its_first_layers(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gemma3's second layer is the first with full attention."""
    folder = folder_of("gemma3")
    monkeypatch.setattr(shortened, "_MAX_WEIGHTS", 0)
    model = plain(folder)
    depths: list[int] = []
    model.model.norm.register_forward_hook(lambda *_: depths.append(len(model.model.layers)))
    assert len(describe_model(model, folder, config(folder), CpuDevice()).groups) == 2
    assert depths.count(4) == 1  # the probe's
    assert set(depths) == {2, 4}
    assert len(model.model.layers) == 4
    add_to_rows(model, lambda count: torch.arange(count) % 3)
    with pytest.raises(EngineConfigError, match="its logits differ"):
        describe_model(model, folder, config(folder), CpuDevice())
    assert len(model.model.layers) == 4


def test_half_precision_weights_are_compared_in_float32_and_not_changed(llama: Path) -> None:
    model = plain(llama).to(torch.bfloat16)
    before = {
        name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()
    }
    types: list[torch.dtype] = []
    model.model.norm.register_forward_hook(lambda _m, _a, out: types.append(out.dtype))
    describe_model(model, llama, config(llama, dtype="bfloat16"), CpuDevice())
    assert torch.float32 in types
    for name, tensor in model.state_dict().items():
        assert (tensor.data_ptr(), tensor.dtype) == (before[name][0], torch.bfloat16)
        assert torch.equal(tensor, before[name][1])


def test_layers_that_differ_by_a_flag_are_all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM3's every fourth layer does not rotate, which its attention's shape and classes do not
    tell.
    """
    model = small.build("smollm3")
    monkeypatch.setattr(shortened, "_MAX_WEIGHTS", 0)
    alike = [LayerKind(AttentionShape(4, 2, 16, 0.25), None)] * len(model.model.layers)
    with shortened.first_layers(model, alike) as depth:
        assert depth == 4
    for layer in model.model.layers:
        layer.self_attn.use_rope = 1
    with shortened.first_layers(model, alike) as depth:
        assert depth == len(model.model.layers) == 2


# ── fused modules ──


class _Broken(nn.Module):
    def __init__(self, original: nn.Module, how: str) -> None:
        super().__init__()
        self.original, self.how = original, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "raises":
            raise AttributeError("no weight")
        if self.how == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        rows: torch.Tensor = self.original(x) + torch.linspace(0, 1, x.shape[1])[None, :, None]
        return rows


def break_fused(how: str, monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Make the fused pass of a CPU fail; return references to the models that it was built in."""
    broken: list[weakref.ref[Any]] = []

    def replace_modules(self: CpuDevice, model: Any, settings: EngineConfig) -> None:
        gc.collect()
        assert not [found for found in broken if found() is not None]
        if settings.fuse:
            broken.append(weakref.ref(model))
            model.model.norm = _Broken(model.model.norm, how)

    monkeypatch.setattr(CpuDevice, "replace_modules", replace_modules)
    return broken


def test_a_fused_pass_without_memory_ends_the_start(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = break_fused("out of memory", monkeypatch)
    with pytest.raises(EngineConfigError) as caught:
        load_model(llama, config(llama, fuse=True), CpuDevice())
    assert str(caught.value).endswith(
        "does not fit into the memory of cpu: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert len(broken) == 1


@pytest.mark.parametrize("how", ["raises", "differs"])
@pytest.mark.parametrize(
    "compared", ["all layers", pytest.param("first layers", marks=pytest.mark.slow)]
)
def test_a_model_broken_by_fused_modules_is_served_without_fusing(
    how: str,
    compared: str,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if compared == "first layers":
        monkeypatch.setattr(shortened, "_MAX_WEIGHTS", 0)

    break_fused(how, monkeypatch)
    with caplog.at_level(logging.WARNING):
        loaded = load_model(llama, config(llama, fuse=True), CpuDevice())
    assert not isinstance(loaded.model.model.norm, _Broken)
    assert [
        record.message for record in caplog.records if "Transformers' own modules" in record.message
    ]


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "longcat_flash", "granitemoehybrid"])
def test_routers_and_layers_without_rope_run_fused(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, linear_kernels: None
) -> None:
    small.build(family, "full layers only" if family == "granitemoehybrid" else "").save_pretrained(
        tmp_path
    )
    with caplog.at_level(logging.WARNING):
        loaded = load_model(tmp_path, config(tmp_path, fuse=True), CpuDevice())
    assert not [record.message for record in caplog.records if "own modules" in record.message]
    assert "PackedLinear" in {type(module).__name__ for module in loaded.model.modules()}


def test_blocks_of_the_backend_s_default_size_run_fused(
    llama: Path, caplog: pytest.LogCaptureFixture, linear_kernels: None
) -> None:
    unset = EngineConfig(model=str(llama), dtype="float32", num_threads=1)
    assert unset.block_size == 0
    with caplog.at_level(logging.WARNING):
        load_model(llama, unset, CpuDevice())
    assert not [record.message for record in caplog.records if "own modules" in record.message]
