"""Opens the cache on disk of a loaded model: the key of its blocks, and the threads that move them.

The key covers whatever decides the content of a block beside its tokens, adapter and salt, which
its hash covers: weights, types, layout, kernels and versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

from tokenmill_schemas.release import version
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.config.engine_config import GIB
from tokenmill_worker.engines.own.device import Device
from tokenmill_worker.engines.own.kv.block_files import BlockFiles
from tokenmill_worker.engines.own.kv.disk_tier import DiskTier
from tokenmill_worker.engines.own.kv.tensors import KVCachePool
from tokenmill_worker.engines.own.model.loader import LoadedModel
from tokenmill_worker.engines.own.model.model_digest import model_digest

# settings that change the last bits of keys and values, or their type; as resolved
_SETTINGS: Final = (
    "dtype", "kv_dtype", "quantization", "attention", "block_size", "fuse", "narrow_weights", "amx"
)  # fmt: skip


def open_disk_cache(
    loaded: LoadedModel,
    drafts: LoadedModel | None,
    config: EngineConfig,
    host_pool: KVCachePool,
    settle: Callable[[], None],
) -> DiskTier:
    """Open the folder that `cache_disk` names, and start the threads that read and write it.

    Args:
        settle: waits until copies to the host pool are done.

    Raises EngineConfigError if the folder cannot be used.
    """
    blocks = host_pool.blocks.view(torch.uint8).numpy()
    folder, limit = Path(config.cache_disk or "").expanduser(), int(config.cache_disk_gib * GIB)
    if limit < 2 * blocks.shape[1]:
        raise EngineConfigError([f"cache_disk_gib ({config.cache_disk_gib:g}) holds no block"])
    try:
        key = _model_key(loaded, drafts, config)
        files = BlockFiles(folder, key, blocks.shape[1], limit)
    except OSError as error:
        reason = f"{error.strerror or error}: {error.filename or folder}"
        raise EngineConfigError([f"cache_disk {folder} cannot be used: {reason}"]) from error
    return DiskTier(files, blocks, settle)


def _model_key(loaded: LoadedModel, drafts: LoadedModel | None, config: EngineConfig) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"tokenmill-disk")
    for model in (loaded, drafts):
        digest.update(b"none" if model is None else model_digest(model.path))
    for layer, scales in sorted(loaded.kv_scales.items()):
        for scale in (scales.key, scales.value):
            digest.update(f"{layer}{scale.tolist()}".encode())
    values = [
        version(),
        torch.__version__,
        metadata.version("transformers"),
        _processor(loaded.device),
    ]
    values += [f"{name}={getattr(config, name)}" for name in _SETTINGS]
    for value in (*values, repr(loaded.groups)):
        digest.update(f"{value}\0".encode())
    return digest.digest()


def _processor(device: Device) -> str:
    """Name the kind of processor: sums have other last bits on another one."""
    if device.torch_device.type == "cuda":
        return torch.cuda.get_device_name(device.torch_device)
    return f"{device.torch_device.type} {torch.backends.cpu.get_cpu_capability()}"
