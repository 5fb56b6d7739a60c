"""Loads a model and builds its runner: device, weights, adapters, attention, cache, grammars."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tokenmill_worker.engines.own.attention import choose
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.config.cache import CacheConfig
from tokenmill_worker.engines.own.config.capabilities import CAPABILITIES, WITHOUT_GRAMMARS
from tokenmill_worker.engines.own.config.machine import usable_cores
from tokenmill_worker.engines.own.cpu import huge_pages
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.cuda.device import CudaDevice
from tokenmill_worker.engines.own.device import Device
from tokenmill_worker.engines.own.execution.interface import RunnerInfo
from tokenmill_worker.engines.own.execution.memory import size_cache, with_step_that_fits
from tokenmill_worker.engines.own.execution.parts import build_parts
from tokenmill_worker.engines.own.execution.runner import ModelRunner
from tokenmill_worker.engines.own.kv.tensors import KVCachePool, kv_dtype
from tokenmill_worker.engines.own.lora import Adapters
from tokenmill_worker.engines.own.model import model_files, probe
from tokenmill_worker.engines.own.model.draft_loader import load_draft_model
from tokenmill_worker.engines.own.model.loader import LoadedModel, describe_model, load_model
from tokenmill_worker.engines.own.model.vocabulary import vocabulary
from tokenmill_worker.engines.own.sampling import GrammarCompiler
from tokenmill_worker.engines.own.types import ProgressCallback


def load_model_runner(
    config: EngineConfig,
    cache_dir: str | None = None,
    on_progress: ProgressCallback | None = None,
) -> ModelRunner:
    """Find (and convert) and load the model, and build its runner.

    Raises:
        EngineConfigError: the settings cannot work here.
        OSError: the model is not found.
    """
    report = on_progress or _ignore
    _set_threads(config)
    path = model_files.resolve(config.model, cache_dir, report, config.trust_remote_code)
    report(f"loading {config.model}", 0.0)
    loaded = load_model(path, config, pick_device(config.device), report)
    return build_runner(loaded, config, report, cache_dir)


def runner_of_model(model: Any, config: EngineConfig) -> ModelRunner:
    """Build a runner around a Transformers model that the caller holds.

    Raises EngineConfigError.
    """
    _set_threads(config)
    if config.cache_disk:
        raise EngineConfigError(["cache_disk needs a model of files, which name its weights"])
    device = pick_device(config.device)
    with tempfile.TemporaryDirectory(prefix="tokenmill-model-") as name:
        folder = Path(name)  # the loader reads the configurations of a model from its folder
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        model.set_attn_implementation(probe.OWN)
        return build_runner(describe_model(model, folder, config, device), config)


def _set_threads(config: EngineConfig) -> None:
    """Set the threads of torch and of our kernels. Torch itself knows no quota of a container."""
    threads = config.num_threads or min(torch.get_num_threads(), usable_cores())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def build_runner(
    loaded: LoadedModel,
    config: EngineConfig,
    on_progress: ProgressCallback | None = None,
    cache_dir: str | None = None,
) -> ModelRunner:
    """Build a runner for a loaded model: choose attention, load a draft model, size and allocate
    the cache.

    Raises EngineConfigError, and OSError if the draft model is not found.
    """
    report = on_progress or _ignore
    device = loaded.device
    may_shorten = config.max_model_len is None
    given, config = config, resolved(config, loaded)
    adapters = _adapters(loaded, config, report)
    dtype = kv_dtype(config, loaded.dtype)
    backend = choose(
        config.attention,
        device.torch_device,
        dtype,
        list(loaded.shapes.values()),
        config.block_size,
        config.amx,
    )
    config = config.replace(
        block_size=backend.block_size_of(config.block_size, device.torch_device)
    )
    drafts = None
    if config.draft_model is not None:
        loaded, drafts = load_draft_model(
            config.draft_model, loaded, config, dtype, backend, cache_dir, report
        )
    config = with_step_that_fits(given, config, loaded, backend, dtype)
    cache_config, length = size_cache(loaded, config, backend, dtype, may_shorten)
    config = config.replace(attention=backend.name, max_model_len=length)

    def allocate(num_blocks: int, where: Device) -> KVCachePool:
        groups, size = loaded.groups, config.block_size
        return KVCachePool.allocate(groups, num_blocks, size, backend, dtype, where)

    pool = allocate(cache_config.num_blocks, device)
    if device.uses_host_memory and pool.num_bytes <= device.free_memory() // 2:
        huge_pages.populate(pool.blocks)  # if memory is scarce, pages come at first use
    num_host_blocks = cache_config.num_host_blocks
    host_pool = allocate(num_host_blocks, CpuDevice()) if num_host_blocks else None
    grammars = _grammar_compiler(loaded, config)
    report(f"loading {config.model}", 1.0)
    info = RunnerInfo(
        config=config,
        cache_config=cache_config,
        max_model_len=length,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        model_path=loaded.path,
        description=_description(config, cache_config, pool),
        capabilities=WITHOUT_GRAMMARS if grammars is None else CAPABILITIES,
        is_asynchronous=bool(config.async_batching),
        sampling_defaults=loaded.sampling_defaults,
        graphed_decodes=device.graph_sizes(config, length).decodes,
    )
    parts = build_parts(loaded, info, backend, pool, host_pool, grammars, adapters, drafts)
    if parts.draft_model is not None:
        parts.draft_model.warm_up()
    return ModelRunner(parts)


def pick_device(name: str) -> Device:
    """Return the named device; "auto" means CUDA where there is one. Raises EngineConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise EngineConfigError([f"device {name!r} is not a device that torch knows"]) from None
    if device.type == "cpu":
        return CpuDevice(device)
    if device.type != "cuda":
        return Device(device)
    if not torch.cuda.is_available():
        raise EngineConfigError([f"device {name!r} was asked for, but torch sees no CUDA device"])
    return CudaDevice(device)


def resolved(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Return the configuration with every "auto" resolved."""
    dtype = str(loaded.dtype).removeprefix("torch.")
    queues_work = loaded.device.is_asynchronous
    # a draft model drafts between two steps
    may_run_ahead = queues_work and config.draft_model is None
    return config.with_step_sizes(on_gpu=loaded.device.is_asynchronous).replace(
        dtype=dtype,
        kv_dtype=str(kv_dtype(config, loaded.dtype)).removeprefix("torch."),
        device=str(loaded.device.torch_device),
        max_model_len=loaded.max_model_len,
        # with recurrent layers only if asked for: no capture of them has run on a device
        cuda_graphs=(
            queues_work and not loaded.state_bytes
            if config.cuda_graphs is None
            else config.cuda_graphs
        ),
        async_batching=may_run_ahead if config.async_batching is None else config.async_batching,
    )


def _adapters(
    loaded: LoadedModel, config: EngineConfig, report: ProgressCallback
) -> Adapters | None:
    """Load the adapters; return None if none are configured.

    They are loaded before the cache is sized, so that their memory counts. Raises
    EngineConfigError.
    """
    folders = {name: Path(folder).expanduser() for name, folder in config.adapter_folders.items()}
    if not folders:
        return None
    num_slots = config.max_loras if config.cuda_graphs else 0
    most = max(config.max_cached_loras, config.max_loras)
    adapters = Adapters(loaded.model, folders, max_cached=most, num_slots=num_slots)
    problems = adapters.check(report)
    if problems:
        raise EngineConfigError(problems)
    return adapters


def _grammar_compiler(loaded: LoadedModel, config: EngineConfig) -> GrammarCompiler | None:
    words = vocabulary(
        loaded.path, loaded.vocab_size, loaded.eos_token_ids, config.trust_remote_code
    )
    if words is None:
        return None
    compiler = words.compiler()
    compiler.start()
    return compiler


def _description(config: EngineConfig, cache_config: CacheConfig, pool: KVCachePool) -> str:
    blocks = cache_config.num_usable
    return (
        f"{config.model} on {config.device}, {config.dtype}, attention {config.attention}, "
        f"{blocks} blocks of {config.block_size} tokens ({pool.num_bytes / 2**30:.2f} GiB)"
        + (f", drafts by {config.draft_model}" if config.draft_model else "")
    )


def _ignore(_message: str, _fraction: float) -> None:
    """ProgressCallback no progress."""
