"""Defines what a kind of engine tells a worker before it is loaded: its settings and abilities.

A kind is a package with two modules for the outside: `config`, whose KIND is an EngineKind, and
`serve`, whose `serve(start, mailbox, emit)` runs the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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

    `config` is a dataclass that raises EngineConfigError. Its `kind` is the name of this kind.
    `settings` are the fields that a worker may set. Those of a kind of our own have a help text in
    their metadata; another one takes settings that a worker has. A loaded engine reports its own
    abilities, which may be fewer than `capabilities`.
    `notes` say in one sentence what this engine does differently with a parameter of a job.
    `instead` says what takes the place of another kind's setting.
    `packages` are the modules of other packages that its process needs, each with what pip installs
    it by.
    """

    config: type[Any]
    settings: tuple[str, ...]
    capabilities: Capabilities
    notes: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
