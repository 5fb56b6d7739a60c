"""Tells vLLM's engine core what binds an answer."""

from __future__ import annotations

from typing import Final

import msgspec

from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.contract.requests import Thoughts

EXTRA: Final = "tokenmill"  # name in the `extra_args` of a request


class BoundAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form and the thoughts of one answer, as they travel to the engine core."""

    response_format: ResponseFormat | None = None
    thoughts: Thoughts | None = None
    num_resumed: int = 0  # tokens at the end of the prompt that are part of the answer
    tenant: str = ""  # whose turn a compilation takes
    key: str = ""  # the request, as the adapter names it
