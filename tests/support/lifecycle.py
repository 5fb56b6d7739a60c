"""Decides what a missing server means for a test."""

import os
from typing import NoReturn

import pytest

from tokenmill_worker.local.valkey_server import ValkeyServerError, server_binary


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it if CI=true."""
    if os.environ.get("CI", "").lower() in ("1", "true"):  # noqa: TID251 - the tests' own switch
        pytest.fail(f"CI must have it: {reason}")
    pytest.skip(reason)


def need_valkey() -> None:
    try:
        server_binary()
    except ValkeyServerError as error:
        missing(str(error))
