"""A pytest plugin for processes that interpret Triton: patches Triton's language once a process.

The interpreter else patches it anew whenever a kernel calls a function, which takes a quarter of
its time.
"""

import functools
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter

_patch: Callable[[Any], Any] = interpreter._patch_lang


@functools.cache
def _patch_once(function: Any) -> Any:
    scope = _patch(function)
    scope._changes.clear()  # nothing is restored: such a process does nothing but interpret
    return scope


interpreter._patch_lang = _patch_once
