"""Loads this engine for a worker, then runs its loop until a Stop command."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from tokenmill_worker.contract.messages import EngineFailed, LoadProgress, Mailbox, Report, Start
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.errors import lacks_memory, why
from tokenmill_worker.engines.own.serve.loop import EngineLoop
from tokenmill_worker.engines.own.serve.time_slices import lengthen_slices

log = logging.getLogger("tokenmill_worker.engines.own")


def serve(start: Start, mailbox: Mailbox, emit: Callable[[Report], None]) -> int:
    """Load the engine and serve until a Stop command, or until it has reported why it cannot go on.

    Return 1 if it could not be loaded, else 0.
    """

    def load() -> Engine:
        log.setLevel(logging.INFO)  # the worker logs compiled kernels and the layout of weights
        try:
            return Engine.load(
                msgspec.convert(start.settings, EngineConfig),
                cache_dir=start.cache_dir,
                on_progress=lambda message, fraction: emit(LoadProgress(message, fraction)),
            )
        finally:
            log.setLevel(logging.NOTSET)

    return serve_loaded(load, mailbox, emit)


def serve_loaded(
    load: Callable[[], Engine], mailbox: Mailbox, emit: Callable[[Report], None]
) -> int:
    """Serve the engine that `load` returns, on this thread."""
    lengthen_slices()  # for this thread and the compute threads it starts, not for the I/O threads
    try:
        engine = load()
    except Exception as error:
        emit(EngineFailed(why(error), at_start=True, may_pass=lacks_memory(error)))
        return 1
    EngineLoop(engine, mailbox, emit).run()
    return 0
