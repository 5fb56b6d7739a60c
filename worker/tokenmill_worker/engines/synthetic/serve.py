"""Serves the synthetic engine: our engine's loop around a runner without a model."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenmill_worker.contract.messages import Mailbox, Report, Start
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.serve import serve_loaded
from tokenmill_worker.engines.synthetic.config import SyntheticConfig
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner


def serve(start: Start, mailbox: Mailbox, emit: Callable[[Report], None]) -> int:
    """Serve until a Stop command, or until the engine has reported why it cannot go on.

    Return 1 if the settings cannot work, else 0.
    """

    def load() -> Engine:
        return Engine.around(SyntheticRunner.load(msgspec.convert(start.settings, SyntheticConfig)))

    return serve_loaded(load, mailbox, emit)
