"""The engine's loop: take commands, step, report; the same in a thread and in a process of its own.

Each step sends one frame; commands are taken between steps. Without work the loop sleeps in the
mailbox and reports twice a second, so that a frozen loop can be told from an idle one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tokenmill_worker.contract.messages import (
    CancelRequest,
    Command,
    EngineFailed,
    LoadProgress,
    Mailbox,
    Ready,
    Report,
    Stop,
    Submit,
)
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engines.frames import IDLE_REPORT_S, FrameSender
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.errors import EngineError, StepsFailError, lacks_memory, why
from tokenmill_worker.engines.own.execution.warm_up import warm_up

log = logging.getLogger(__name__)

# interval of checks for a grammar, an adapter or blocks when there is no other work
PENDING_POLL_S = 0.002


class EngineLoop:
    """Runs the engine on the calling thread.

    `emit` is called between steps and must not block for long.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        emit: Callable[[Report], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._emit = emit
        self._frames = FrameSender(emit, clock)

    def run(self) -> None:
        """Warm up, report Ready, then run until a Stop command or until the engine is broken.

        A broken engine is reported as EngineFailed.
        """
        try:
            warm_up(
                self._engine.runner,
                lambda message, fraction: self._emit(LoadProgress(message, fraction)),
            )
        except Exception as error:
            words = f"the first step failed: {why(error)}"
            self._emit(EngineFailed(words, at_start=True, may_pass=lacks_memory(error)))
            self._close(self._engine.runner.close)
            return
        close = self._engine.close
        self._emit(self._ready())
        try:
            while self._run_once():
                pass
        except EngineError as error:
            self._emit(EngineFailed(str(error), any_step=isinstance(error, StepsFailError)))
            close = self._engine.runner.close  # no further step
        finally:
            self._close(close)

    def _close(self, close: Callable[[], None]) -> None:
        """Close the engine, or its runner alone, and log errors.

        On a lost device closing fails too; that error is not the cause and is not reported.
        """
        try:
            close()
        except Exception as error:
            log.warning("The engine's memory could not be freed: %s", error)

    def _run_once(self) -> bool:
        engine = self._engine
        waits_only = engine.waits_only
        commands = self._mailbox.take_all(
            PENDING_POLL_S if waits_only else 0.0 if engine.has_work else IDLE_REPORT_S
        )
        if not self._apply(commands):
            return False
        events = tuple(engine.step())
        if events or not waits_only or self._frames.is_due:
            self._frames.send(events, engine.capacity(), engine.stats, has_work=engine.has_work)
        return True

    def _apply(self, commands: list[Command]) -> bool:
        requests: list[GenerationRequest] = []
        for command in commands:
            match command:
                case Submit():
                    requests += command.requests
                case CancelRequest():
                    if requests:  # order matters: a cancel may follow its own submit
                        self._engine.submit(requests)
                        requests = []
                    self._engine.cancel(command.request_id, command.reason, command.choice)
                case Stop():
                    return False
        if requests:
            self._engine.submit(requests)
        return True

    def _ready(self) -> Ready:
        runner = self._engine.runner
        return Ready(
            model=runner.info.config.model,
            max_model_len=self._engine.scheduler.max_model_len,
            max_num_seqs=runner.info.config.max_num_seqs,
            vocab_size=runner.info.vocab_size,
            eos_token_ids=tuple(sorted(runner.info.eos_token_ids)),
            model_path=str(runner.info.model_path),
            description=runner.info.description,
            capacity=self._engine.capacity(),
            sampling_defaults=runner.info.sampling_defaults,
            capabilities=runner.info.capabilities,
        )
