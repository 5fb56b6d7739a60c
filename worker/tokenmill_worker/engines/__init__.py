"""Engines that a worker can run, and the process that holds one.

A kind of engine is a package with two modules for the outside: `config`, whose KIND has its
settings and abilities, and `serve`, whose `serve(start, mailbox, emit)` loads it and runs until a
Stop command.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final, Literal, get_args

from tokenmill_worker.contract.engine_kind import EngineKind
from tokenmill_worker.contract.messages import Mailbox, Report, Start

Kind = Literal["own", "synthetic", "vllm"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

Serve = Callable[[Start, Mailbox, Callable[[Report], None]], int]


def kind_for(model: str) -> Kind:
    """Return the kind of engine that a model's name asks for."""
    return "synthetic" if model.partition("?")[0] == "synthetic" else "own"


def kind_named(name: str) -> EngineKind:
    """Return the settings and abilities of a kind, without loading what runs it."""
    kind: EngineKind = import_module(f"{__name__}.{name}.config").KIND
    return kind


def serve_of(name: str) -> Serve:
    """Return the function that serves an engine, which returns the exit status of its process.

    Its module is imported only now: it may need packages that no other engine needs.
    """
    serve: Serve = import_module(f"{__name__}.{name}.serve").serve
    return serve
