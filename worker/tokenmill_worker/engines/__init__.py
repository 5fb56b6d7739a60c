"""Engines that a worker can run, and the process that holds one.

A kind of engine is a package with two modules for the outside: `config`, whose KIND has its
settings and abilities, and `serve`, whose `serve(start, mailbox, emit)` loads it and runs until a
Stop command. Its name is that of a package in this room, or, with a dot, of one anywhere else.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final, Literal, get_args

from tokenmill_worker.contract.engine_kind import EngineConfigError, EngineKind
from tokenmill_worker.contract.messages import Mailbox, Report, Start

Kind = Literal["own", "synthetic", "vllm"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

Serve = Callable[[Start, Mailbox, Callable[[Report], None]], int]


def kind_for(model: str) -> Kind:
    """Return the kind of engine that a model's name asks for."""
    return "synthetic" if model.partition("?")[0] == "synthetic" else "own"


def kind_named(name: str) -> EngineKind:
    """Return the settings and abilities of a kind, without loading what runs it.

    Raises EngineConfigError for a name that is of no kind.
    """
    try:
        kind: EngineKind = _module(name, "config").KIND
    except Exception as error:  # a package of anybody's may raise any
        if name in KINDS:
            raise
        known = ", ".join(KINDS)
        why = f": {_sentence(error)}" if "." in name else ""
        raise EngineConfigError(
            [f"engine must be {known} or a package as my_package.my_engine, not {name!r}{why}"]
        ) from error
    return kind


def missing_packages(name: str) -> str:
    """Return one sentence on the packages of a kind that this interpreter lacks; empty: none."""
    packages = kind_named(name).packages
    missing = [module for module in packages if find_spec(module) is None]
    if not missing:
        return ""
    wanted = " ".join(dict.fromkeys(packages[module] for module in missing))
    return (
        f"the engine {name} needs {', '.join(missing)}: {sys.executable} -m pip install {wanted}, "
        "or name another environment's Python with --engine-python"
    )


def serve_of(name: str) -> Serve:
    """Return the function that serves an engine, which returns the exit status of its process.

    Its module is imported only now: it may need packages that no other engine needs. Raises
    EngineConfigError if that fails.
    """
    try:
        serve: Serve = _module(name, "serve").serve
    except Exception as error:  # a package of anybody's may raise any
        words = f"the engine {name} cannot be imported: {_sentence(error)}"
        raise EngineConfigError([words]) from error
    return serve


def raised_by(name: str, error: Exception) -> str:
    """Return one sentence on an error that an engine's `serve` has raised, with its place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"the engine {name} cannot go on: {_sentence(error)} ({where})"


def _sentence(error: Exception) -> str:
    words, kind = str(error).strip().partition("\n")[0], type(error).__name__
    if isinstance(error, ImportError):
        return words
    return f"{kind}: {words}" if words else kind


def _module(kind: str, name: str) -> ModuleType:
    """Import a module of a kind of engine."""
    if "." not in kind and kind not in KINDS:
        raise ImportError(f"there is no engine {kind!r}")
    package = kind if "." in kind else f"{__name__}.{kind}"
    return import_module(f"{package}.{name}")
