"""A pytest plugin for processes that interpret Triton: patches Triton's language once a process.

The interpreter else patches it anew whenever a kernel calls a function, which takes a quarter of
its time.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from triton.runtime import interpreter

_patch: Callable[[Any], Any] = interpreter._patch_lang


@functools.cache
def _patch_once(function: Any) -> Any:
    scope = _patch(function)
    scope._changes.clear()  # nothing is restored: such a process does nothing but interpret
    return scope


interpreter._patch_lang = _patch_once


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--once",
        action="store_true",
        help="run each test with the first of its parameters; all cases of tests given by name",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one case of each test, and those whose name, or whose test's, is an argument."""
    if config.getoption("--once"):
        seen = set[str]()
        kept = []
        for item in items:
            name = item.nodeid.partition("[")[0]
            if name not in seen or {name, item.nodeid} & {*config.args}:
                kept.append(item)
            seen.add(name)
        items[:] = kept
