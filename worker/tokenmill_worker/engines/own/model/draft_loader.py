"""Loads a draft model, and refuses one that does not fit the model whose tokens it drafts."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill_worker.engines.own.attention import AttentionBackend, why_not
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.config.cache import with_drafts
from tokenmill_worker.engines.own.model import model_files
from tokenmill_worker.engines.own.model.loader import LoadedModel, load_model
from tokenmill_worker.engines.own.model.vocabulary import differing_token, has_tokenizer
from tokenmill_worker.engines.own.types import ProgressCallback


def load_draft_model(
    name: str,
    target: LoadedModel,
    config: EngineConfig,
    kv_dtype: torch.dtype,
    backend: AttentionBackend,
    cache_dir: str | None,
    report: ProgressCallback,
) -> tuple[LoadedModel, LoadedModel]:
    """Load a draft model in the type and on the device of `target`, whose tokens it drafts.

    Returns:
        The target with the draft model's layers in its groups, and the draft model.

    Raises:
        EngineConfigError: the draft model cannot be served, or does not fit the target.
        OSError: it is not found.
    """
    path = model_files.resolve(name, cache_dir, report, config.trust_remote_code)
    if found := differing_token(target.path, path, config.trust_remote_code):
        raise _refused(name, f"its tokenizer is not the model's: {found}")
    settings = config.replace(
        model=name, draft_model=None, adapters="", generation_config="none", max_model_len=None,
        dtype=str(target.dtype).removeprefix("torch."),
    )  # fmt: skip
    loaded = load_model(path, settings, target.device, report)
    sizes = loaded.vocab_size, target.vocab_size
    if sizes[0] != sizes[1] and not (has_tokenizer(path) and has_tokenizer(target.path)):
        raise _refused(name, f"its vocabulary has {sizes[0]} tokens, the model's {sizes[1]}")
    if loaded.state_bytes:
        raise _refused(name, "some of its layers keep recurrent states")
    device, shapes = target.device.torch_device, list(loaded.shapes.values())
    if reason := why_not(backend.name, device, kv_dtype, shapes, config.block_size):
        raise _refused(name, f"the model runs on attention {backend.name!r}, but {reason}")
    groups = with_drafts(target.groups, loaded.groups)
    if groups is None:
        raise _refused(name, "no layer of the model attends to all earlier tokens")
    return replace(target, groups=groups), loaded


def _refused(name: str, why: str) -> EngineConfigError:
    return EngineConfigError([f"draft_model {name} cannot be used: {why}"])
