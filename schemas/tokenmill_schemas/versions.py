"""Versions of a request: a worker refuses one that needs a later version than it reads.

Workers of version 1 ignore a number in `JobRequest.v`, so later versions are written as text: they
refuse such a request with a sentence, where they would otherwise leave out what they do not know.
"""

from typing import Final

from tokenmill_schemas.job import JobRequest

SCHEMA_VERSION: Final = 3  # the newest version that this code reads
_FIELDS_OF_2: Final = ("chat_template_kwargs", "documents", "continue_final_message", "tools")
_PARAMS_OF_2: Final = ("logprobs_mode", "thinking_budget")


def wire_version(request: JobRequest) -> int | str:
    """Return the least version whose workers honour every field of the request."""
    params = request.params
    if params.prompt_logprobs is not None or params.echo or request.continuations:
        return "3"
    is_first = (
        not any(getattr(request, name) for name in _FIELDS_OF_2)
        and request.add_generation_prompt is None
        and all(getattr(request.params, name) is None for name in _PARAMS_OF_2)
        and all(message.is_plain for message in request.messages or ())
    )
    return 1 if is_first else "2"
