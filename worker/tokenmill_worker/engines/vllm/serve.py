"""Loads vLLM for a worker, then takes commands in vLLM's event loop until a Stop command."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from tokenmill_worker.contract.messages import (
    CancelRequest,
    EngineFailed,
    LoadProgress,
    Mailbox,
    Ready,
    Report,
    Start,
    Stop,
    Submit,
)
from tokenmill_worker.engines.frames import FrameSender
from tokenmill_worker.engines.own.errors import lacks_memory, why
from tokenmill_worker.engines.vllm import plugin
from tokenmill_worker.engines.vllm.config import VllmConfig
from tokenmill_worker.system.private_directory import private_directory

if TYPE_CHECKING:
    from tokenmill_worker.engines.vllm.adapter import Adapter

Emit = Callable[[Report], None]
TICK_S: Final = 0.1
SHUTDOWN_S: Final = 2.0


def serve(start: Start, mailbox: Mailbox, emit: Emit) -> int:
    """Load vLLM and serve until a Stop command, or until it has reported why it cannot go on.

    Return 1 if it could not be loaded, else 0.
    """
    own = str(private_directory("vllm"))
    environment = os.environ  # noqa: TID251 - vLLM reads it, and its processes
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    shared = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", shared)  # else among its own files
    # its sockets and files, which a kill leaves
    environment |= dict.fromkeys((plugin.VARIABLE, "TMPDIR", "VLLM_RPC_BASE_PATH"), own)
    # a fork would keep the worker's socket open behind the death of this process
    environment |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
    try:
        return asyncio.run(_served(start, mailbox, emit))
    finally:
        shutil.rmtree(own, ignore_errors=True)


async def _served(start: Start, mailbox: Mailbox, emit: Emit) -> int:
    try:
        adapter, ready = _load(start, mailbox, emit)
    except Exception as error:
        words = plugin.taken_note(plugin.ERROR) or _reason(error)
        emit(EngineFailed(words, at_start=True, may_pass=lacks_memory(RuntimeError(words))))
        return 1
    emit(ready)
    try:
        while await _goes_on(adapter, mailbox):
            await adapter.tick()
    except Exception as error:
        words = _reason(error)
        if adapter.engine.errored:
            cause = plugin.taken_note(plugin.ERROR, newer_than_s=2 * plugin.BURST_S)
            words = f"vLLM's engine core has died: {cause or 'it has logged no error'}"
        emit(EngineFailed(words))
    finally:
        adapter.engine.shutdown(timeout=SHUTDOWN_S)
    return 0


async def _goes_on(adapter: Adapter, mailbox: Mailbox) -> bool:
    """Take commands; return False at Stop. Raises vLLM's error when its engine core has died."""
    if adapter.engine.errored:
        raise adapter.engine.dead_error
    for command in await asyncio.to_thread(mailbox.take_all, TICK_S):
        match command:
            case Submit():
                await adapter.submit(command.requests)
            case CancelRequest():
                await adapter.cancel(command)
            case Stop():
                return False
    return True


def _load(start: Start, mailbox: Mailbox, emit: Emit) -> tuple[Adapter, Ready]:
    import vllm

    from tokenmill_worker.engines.vllm import arguments

    arguments.check_version(vllm.__version__)

    from tokenmill_worker.engines.own.model.model_files import resolve
    from tokenmill_worker.engines.vllm.adapter import Adapter

    def report(what: str, fraction: float) -> None:
        emit(LoadProgress(what, fraction))

    settings = msgspec.convert(start.settings, VllmConfig)
    folder = resolve(settings.model, start.cache_dir, report, settings.trust_remote_code)
    args = arguments.engine_args(settings, folder)
    report("loading the model into vLLM", 0.0)
    config = args.create_engine_config()
    plugin.install()  # here as in vLLM's other processes, so that it is known to work
    adapter = Adapter(config, settings, folder, FrameSender(emit), mailbox)
    limits, capacity, parallel = adapter.limits, adapter.capacity(), config.parallel_config
    return adapter, Ready(
        model=settings.model, model_path=str(folder), max_model_len=limits.max_model_len,
        max_num_seqs=capacity.free_sequences, vocab_size=limits.vocab_size,
        eos_token_ids=adapter.eos, capacity=capacity, sampling_defaults=limits.defaults,
        capabilities=adapter.capabilities,
        description=(
            f"vLLM {vllm.__version__}, {config.model_config.dtype}, "
            f"runner {'V2' if adapter.capabilities.exact_resume else 'V1'}, "
            f"{parallel.tensor_parallel_size} × {parallel.pipeline_parallel_size} devices, "
            f"{capacity.free_blocks} blocks of {capacity.block_size} tokens"
        ),
    )  # fmt: skip


def _reason(error: Exception) -> str:
    if details := getattr(error, "errors", None):  # pydantic's, whose text has several lines
        return "; ".join(one["msg"].removeprefix("Value error, ") for one in details())
    return why(error)
