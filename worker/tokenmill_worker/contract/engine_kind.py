"""Defines what a kind of engine tells a worker before it is loaded: its settings and abilities.

A kind is a package of `tokenmill_worker.engines` with two modules for the outside: `config`, whose
KIND is an EngineKind, and `serve`, whose `serve(start, mailbox, emit)` runs the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill_worker.contract.capabilities import Capabilities


class EngineConfigError(ValueError):
    """Settings that cannot work; `problems` lists each as one sentence."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """The settings and abilities of a kind of engine.

    `config` is a dataclass, whose fields have a help text in their metadata. Its `kind` is the
    name of this kind, and it raises EngineConfigError. `settings` are the fields that a worker may
    set. A loaded engine reports its own abilities, which may be fewer than `capabilities`.
    """

    config: type[Any]
    settings: tuple[str, ...]
    capabilities: Capabilities
