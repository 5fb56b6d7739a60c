"""Engines that a worker can run, and the process that holds one.

An engine is a package with a module `serve`, whose `serve(start, mailbox, emit)` loads it and runs
until a Stop command.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from tokenmill_worker.contract.mailbox import Mailbox
from tokenmill_worker.contract.messages import Report, Start

Serve = Callable[[Start, Mailbox, Callable[[Report], None]], int]

_MODULES = {"own": "tokenmill_worker.engines.own.serve"}


def serve_of(engine: str) -> Serve:
    """Return the function that serves an engine, which returns the exit status of its process.

    Its module is imported only now: it may need packages that no other engine needs.
    """
    serve: Serve = import_module(_MODULES[engine]).serve
    return serve
