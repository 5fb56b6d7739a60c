"""Keeps the keys and values of multi-head latent attention (MLA) compressed in the KV cache.

Such a layer (arXiv 2405.04434) computes every head's key and value from one latent vector per
token, by the weight of `kv_b_proj`. Key and value are linear in the latent, so a query can be
multiplied by its head's part of that weight instead, and the attended latents by the other part.
In the engine's steps a layer then has one key (the latent and the rotated part that all heads
share) and one value (the latent). The arithmetic of a score grows, the bytes of a token shrink.

No family is named: a module fits if its `expand_kv`, called on random rows, computes these keys
and values. Any other call of the model runs the module's own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.attention import AttentionShape, serving_backend, why_not
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.model.layer_groups import Layers, shapes_of
from tokenmill_worker.engines.own.model.paged_attention import IMPLEMENTATION
from tokenmill_worker.engines.own.model.probe import PROBING

log = logging.getLogger(__name__)

_TOLERANCE = 0.05  # of the largest number; weights and rows may have 16 bits
_ENGINES = (IMPLEMENTATION, PROBING)  # attention functions of the engine


def adapt(model: nn.Module, layers: Layers, config: EngineConfig, has_kv_scales: bool) -> Layers:
    """Make fitting layers keep their keys and values compressed; return all layers as they are now.

    All such layers of a model take one form. The log tells which and why.

    Args:
        model: the model, on its device.
        layers: its layers, as the probing pass found them.
        config: the engine's settings.
        has_kv_scales: the checkpoint has scales for keys and values in 8 bits.
    """
    expanded = shapes_of(layers)
    parts: Iterator[Any] = model.modules()
    modules = {
        part.layer_idx: part
        for part in parts
        if hasattr(part, "expand_kv") and getattr(part, "layer_idx", None) in expanded
    }
    if not modules:
        return layers
    most = max(_numbers(expanded[index]) for index in modules)
    reason = _unfit_settings(config, has_kv_scales)
    forms = {} if reason else {index: LatentForm.of(module) for index, module in modules.items()}
    fitting = [form for form in forms.values() if form is not None]
    compressed = {form.layer: form.shape_of(expanded[form.layer]) for form in fitting}
    if not reason and len(fitting) < len(modules):
        reason = "the weights that expand them cannot be read"
    if reason := reason or _why_not(model, expanded, compressed, config):
        log.info(
            "The KV cache holds the keys and values of every head, %d numbers a token and layer: "
            "no latents, because %s",
            most,
            reason,
        )
        return layers
    for form in fitting:
        form.attach()
    log.info(
        "The KV cache holds latents, %d numbers a token and layer; the keys and values of every "
        "head would be %d",
        max(map(_numbers, compressed.values())),
        most,
    )
    return [
        replace(kind, shape=compressed[index]) if kind and index in compressed else kind
        for index, kind in enumerate(layers)
    ]


def detach(model: nn.Module) -> None:
    """Undo what `adapt` did to a model that an engine had before."""
    for module in model.modules():
        if isinstance(form := getattr(module, "latent_form", None), LatentForm):
            form.detach()


def _unfit_settings(config: EngineConfig, has_kv_scales: bool) -> str | None:
    """Return why the settings leave no latents, or None if they do."""
    if config.adapters:
        return "an adapter may change the weight that expands them"
    return "the checkpoint has scales for keys and values" if has_kv_scales else None


def _why_not(
    model: nn.Module,
    expanded: dict[int, AttentionShape],
    compressed: dict[int, AttentionShape],
    config: EngineConfig,
) -> str | None:
    """Return why the layers cannot have `compressed` shapes, or None if they can."""
    if any(_numbers(shape) >= _numbers(expanded[index]) for index, shape in compressed.items()):
        return "they would take no less"
    weight = next(model.parameters())
    dtype = weight.dtype if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)
    size = config.block_size
    backend, _ = serving_backend(
        config.attention, weight.device, dtype, list(expanded.values()), size
    )
    if backend is None:  # the choice of the backend will report it
        return "no attention backend fits"
    shapes = list((expanded | compressed).values())
    reason = why_not(backend, weight.device, dtype, shapes, size)
    return None if reason is None else f"of attention {backend!r}: {reason}"


def _numbers(shape: AttentionShape) -> int:
    return 2 * shape.num_kv_heads * shape.head_dim


class LatentForm:
    """The compressed form of one attention module.

    `attach` makes the module use it in the engine's steps. Its keys are the latent and the rotated
    part, its values the latent. The weights are views of `kv_b_proj`'s.
    """

    def __init__(self, module: Any) -> None:
        self.layer: int = module.layer_idx
        self._module = module
        self._rank: int = module.kv_lora_rank
        self._key_size: int = module.qk_nope_head_dim
        self._rotated_size: int = module.qk_rope_head_dim
        self._value_size: int = module.v_head_dim
        self._own: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.expand_kv

    @classmethod
    def of(cls, module: Any) -> LatentForm | None:
        """Return the form of an attention module; None for one that computes something else."""
        projection = getattr(module, "kv_b_proj", None)
        if type(projection) is not nn.Linear or getattr(projection, "bias", None) is not None:
            return None
        try:
            form = cls(module)
            return form if form._is_equivalent() else None
        except (AttributeError, RuntimeError) as error:  # of another structure
            log.debug("Latents of a layer cannot be used: %s", error)
            return None

    def attach(self) -> None:
        """Use this form in the engine's steps from now on."""
        self._module.expand_kv = self._expand
        self._module.latent_form = self
        self._module.weights_read = ("kv_b_proj",)

    def detach(self) -> None:
        """Undo `attach`."""
        for name in ("expand_kv", "latent_form", "weights_read"):
            delattr(self._module, name)

    def shape_of(self, expanded: AttentionShape) -> AttentionShape:
        """Return the shape of the layer's attention over latents."""
        return replace(expanded, num_kv_heads=1, head_dim=self._rank + self._rotated_size)

    def of_query(self, query: Tensor) -> Tensor:
        """Return queries that read latents, `[1, num_heads, num_tokens, rank + rotated size]`.

        `query` is `[1, num_heads, num_tokens, head_dim]`.
        """
        plain, rotated = torch.split(query[0], [self._key_size, self._rotated_size], dim=-1)
        return torch.cat([torch.bmm(plain, self._weights()[0]), rotated], dim=-1)[None]

    def of_output(self, attended: Tensor) -> Tensor:
        """Return attended values `[num_tokens, num_heads, value size]` of attended latents
        `[num_tokens, num_heads, rank]`.
        """
        return torch.bmm(attended.transpose(0, 1), self._weights()[1].mT).transpose(0, 1)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights `[num_heads, size, rank]` of keys and of values."""
        weight = self._module.kv_b_proj.weight
        by_head = weight.view(-1, self._key_size + self._value_size, self._rank)
        key, value = torch.split(by_head, [self._key_size, self._value_size], dim=1)
        return key, value

    def _expand(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Stand for `expand_kv`: latents and rotated parts are `[1, 1, num_tokens, size]`."""
        if self._module.config._attn_implementation not in _ENGINES:
            return self._own(latent, rotated)
        return torch.cat([latent, rotated], dim=-1), latent

    @torch.inference_mode()
    def _is_equivalent(self) -> bool:
        """Return whether the module's own function computes what the weights do."""
        weight = self._module.kv_b_proj.weight
        generator = torch.Generator().manual_seed(1)
        latent, rotated = (
            torch.randn(1, 1, 3, size, generator=generator).to(weight)
            for size in (self._rank, self._rotated_size)
        )
        key, value = self._own(latent, rotated)
        keys, values = (part.mT for part in self._weights())
        expected = torch.cat([latent @ keys, rotated.expand(-1, len(keys), -1, -1)], dim=-1)
        return _close(key, expected) and _close(value, latent @ values)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())
