"""Servers of a test's own: how a `with` statement starts and stops them, and what it means where there are none."""

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import NoReturn, Self

import pytest

from worker.embedded import EmbeddedServerError, server_binary


class Stoppable(ABC):
    @abstractmethod
    def start(self) -> Self: ...

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def missing(reason: str) -> NoReturn:
    """Skips at home, fails where CI=true."""
    if os.environ.get("CI", "").lower() in ("1", "true"):  # noqa: TID251 - the tests' own switch
        pytest.fail(f"CI must have it: {reason}")
    pytest.skip(reason)


def need_valkey() -> None:
    try:
        server_binary()
    except EmbeddedServerError as error:
        missing(str(error))
