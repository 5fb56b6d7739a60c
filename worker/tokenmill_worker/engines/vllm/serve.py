"""Loads vLLM for a worker, then takes commands in vLLM's event loop until a Stop command."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmill_schemas.generation import SamplingNumbers, SamplingParams
from tokenmill_worker.contract.messages import (
    CancelRequest,
    Command,
    EngineFailed,
    LoadProgress,
    Mailbox,
    Ready,
    Report,
    Start,
    Stop,
    Submit,
)
from tokenmill_worker.engines.limits import ModelLimits
from tokenmill_worker.engines.vllm import plugin
from tokenmill_worker.engines.vllm.config import VllmConfig, capabilities_of

TICK_S: Final = 0.1
SHUTDOWN_S: Final = 2.0

Emit = Callable[[Report], None]


def serve(start: Start, mailbox: Mailbox, emit: Emit) -> int:
    """Load vLLM and serve until a Stop command, or until it has reported why it cannot go on.

    Return 1 if it could not be loaded, else 0.
    """
    with tempfile.TemporaryDirectory(prefix="tokenmill-vllm-") as refusals:
        variables = {
            plugin.VARIABLE: refusals,
            # a fork would keep the worker's socket open behind the death of this process
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),  # noqa: TID251
            "VLLM_NO_USAGE_STATS": "1",
        }
        os.environ.update(variables)  # noqa: TID251 - vLLM reads them, and its processes
        return asyncio.run(_served(start, mailbox, emit))


async def _served(start: Start, mailbox: Mailbox, emit: Emit) -> int:
    try:
        emit(LoadProgress("importing vLLM", 0.0))
        adapter, ready = _load(start, emit)
    except Exception as error:
        emit(EngineFailed(_sentence(error), at_start=True))
        return 1
    emit(ready)
    commands, ticks_s = _arrivals(mailbox), 0.0
    try:
        while not adapter.engine.errored:
            if time.monotonic() >= ticks_s:
                await adapter.tick()
                ticks_s = time.monotonic() + TICK_S
            try:
                async with asyncio.timeout(TICK_S):
                    command = await commands.get()
            except TimeoutError:
                continue
            match command:
                case Submit():
                    await adapter.submit(command)
                case CancelRequest():
                    await adapter.cancel(command)
                case Stop():
                    return 0
        emit(EngineFailed("vLLM's engine core has died"))
    except Exception as error:
        dead = "vLLM's engine core has died: " if adapter.engine.errored else ""
        emit(EngineFailed(dead + _sentence(error)))
    finally:
        adapter.engine.shutdown(timeout=SHUTDOWN_S)
    return 0


def _arrivals(mailbox: Mailbox) -> asyncio.Queue[Command]:
    """Pass commands from the mailbox into this event loop, by a thread."""
    loop, commands = asyncio.get_running_loop(), asyncio.Queue[Command]()

    def read() -> None:
        while True:
            for command in mailbox.take_all(timeout=60.0):
                loop.call_soon_threadsafe(commands.put_nowait, command)

    threading.Thread(target=read, name="mailbox", daemon=True).start()
    return commands


def _load(start: Start, emit: Emit) -> tuple[Any, Ready]:
    import vllm

    from tokenmill_worker.engines.vllm.arguments import check_version, engine_args

    check_version(vllm.__version__)
    from vllm.v1.engine.async_llm import AsyncLLM

    from tokenmill_worker.engines.own.model.model_files import resolve
    from tokenmill_worker.engines.own.model.vocabulary import has_tokenizer
    from tokenmill_worker.engines.vllm.adapter import Adapter, StepHook
    from tokenmill_worker.engines.vllm.figures import Figures

    def report(what: str, fraction: float) -> None:
        emit(LoadProgress(what, fraction))

    settings = msgspec.convert(start.settings, VllmConfig)
    folder = resolve(settings.model, start.cache_dir, report, settings.trust_remote_code)
    args = engine_args(settings, str(folder))
    emit(LoadProgress("loading the model into vLLM", 0.0))
    config = args.create_engine_config()
    plugin.install()  # here as in vLLM's other processes, so that it is known to work
    hooks: list[StepHook] = []

    class Hook(StepHook):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            super().__init__(vllm_config, engine_index)
            hooks.append(self)

    engine = AsyncLLM.from_vllm_config(config, stat_loggers=[Hook], disable_log_stats=True)
    emit(LoadProgress("loading the model into vLLM", 1.0))
    model, cache, parallel = engine.model_config, config.cache_config, config.parallel_config
    defaults, eos = _generation_defaults(folder, model)
    is_v2 = bool(getattr(config, "use_v2_model_runner", False))
    capabilities = capabilities_of(
        has_grammars=plugin.is_installed() and has_tokenizer(folder),
        has_adapters=bool(settings.adapters),
        has_position_seeds=is_v2,
    )
    limits = ModelLimits(
        model.get_vocab_size(), model.max_model_len, bool(capabilities.structured), defaults
    )
    figures = Figures(
        config.scheduler_config.max_num_seqs,
        model.max_model_len,
        cache.block_size,
        (cache.num_gpu_blocks or 0) * max(1, len(hooks)),
    )
    adapter = Adapter(
        engine, emit, figures, limits, settings.adapter_folders, eos=eos, has_position_seeds=is_v2
    )
    for hook in hooks:
        hook.adapter = adapter
    logging.getLogger("vllm").propagate = True
    return adapter, Ready(
        model=settings.model,
        max_model_len=model.max_model_len,
        max_num_seqs=figures.max_num_seqs,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=eos,
        model_path=str(folder),
        description=(
            f"vLLM {vllm.__version__}, {model.dtype}, runner {'V2' if is_v2 else 'V1'}, "
            f"{parallel.tensor_parallel_size} × {parallel.pipeline_parallel_size} devices, "
            f"{figures.blocks_total} blocks of {cache.block_size} tokens"
        ),
        capacity=adapter.capacity(),
        sampling_defaults=defaults,
        capabilities=capabilities,
    )


def _generation_defaults(folder: Path, model: Any) -> tuple[SamplingParams, tuple[int, ...]]:
    """Return the sampling defaults of a model's folder, and the ids that end an answer."""
    file = folder / "generation_config.json"
    given = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    ids = given.get("eos_token_id", getattr(model.hf_text_config, "eos_token_id", None))
    eos = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
    named = {name: given[name] for name in SamplingNumbers._fields if given.get(name) is not None}
    return SamplingParams(**named), eos


def _sentence(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:2_000]
