"""Checks the continuations of a request, without a model."""

from collections.abc import Iterator
from typing import Final

import msgspec

from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.params_validation import MAX_CHOICES, encoded_size, id_problems
from tokenmill_schemas.size_limits import MAX_FORMAT_CHARS

_PARAMS: Final = frozenset({"logprobs", "top_logprobs", "lora", "speculate"})
_DEFAULTS: Final = SamplingParams()
_WHY: Final = "cannot be given with continuations: they are scored, and nothing is drawn"


def continuation_problems(request: JobRequest) -> Iterator[str]:
    """Yield one sentence for each problem of the continuations, and of what stands beside them."""
    given = request.continuations
    if not given:
        return
    if len(given) > MAX_CHOICES:
        yield f"continuations may have {MAX_CHOICES} entries, not {len(given)}"
        return
    for i, one in enumerate(given):
        yield from _problems_of_one(one, f"continuations[{i}]", request.prompt_ids is not None)
    size = encoded_size(given)
    if size is not None and size > MAX_FORMAT_CHARS:
        yield f"continuations may have {MAX_FORMAT_CHARS} bytes, not {size}"
    if request.tools:
        yield f"tools {_WHY}"
    for field in msgspec.structs.fields(SamplingParams):
        name = field.name
        if name not in _PARAMS and getattr(request.params, name) != getattr(_DEFAULTS, name):
            yield f"{name} {_WHY}"


def _problems_of_one(given: str | tuple[int, ...], where: str, has_ids: bool) -> Iterator[str]:
    if not given:
        yield f"{where} is empty; it needs at least one token"
    elif not isinstance(given, str):
        yield from id_problems(where, given)
    elif has_ids:
        yield f"{where} is a text, and the prompt is token ids: give token ids here too"
