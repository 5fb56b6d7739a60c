"""Fused replacements for a decoder's modules on a CUDA device.

They are norms with additions, rotation with the cache write, gated activations, and one product for
queries, keys and values. Only modules imported by this one need Triton.

Belongs here: CUDA replacements and their kernels. The module walk belongs to `model.replacement`.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

from torch import nn

from tokenmill_worker.engines.own.config import EngineConfig

log = logging.getLogger(__name__)


def fuse_where_possible(model: nn.Module, config: EngineConfig) -> None:
    """Replace a loaded model's modules in place, where the settings allow it."""
    if not config.fuse:
        return
    if find_spec("triton") is None:
        log.warning(
            "Triton is not installed; the model runs on Transformers' own modules, which is slower"
        )
        return
    from tokenmill_worker.engines.own.cuda.fused.replace import replace_modules

    replace_modules(model)
