"""The error of a grammar that cannot be used."""

from __future__ import annotations

from typing import Final

from tokenmill_worker.contract.requests import RequestError

LATER: Final = "engine_error"  # the code of what may succeed when it is tried again


class GrammarError(RequestError):
    """A grammar that cannot be used; its text is one sentence for the user. The request is at
    fault, unless the code says otherwise.
    """
