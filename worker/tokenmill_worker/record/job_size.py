"""Estimates how much memory a finished job holds."""

from __future__ import annotations

from typing import Final

from tokenmill_schemas.generation import TokenLogprob
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import ChoiceResult, ScoredPrompt
from tokenmill_worker.jobs import FinishedJob

# bytes of CPython objects, on 64 bits
_JOB: Final = 4_096
_TOKEN: Final = 72  # two numbers, and their places in `token_ids` and `text_ends`
_LOGPROB: Final = 168  # the struct, its number, the tuples of alternatives and of their bytes
_ALTERNATIVE: Final = 144  # a pair, its two numbers, its place, and that of its bytes


def size_of(finished: FinishedJob) -> int:
    """Return the estimated bytes of a job. Only lengths are read, so the cost does not grow with
    the tokens.
    """
    request = finished.request
    return (
        _JOB
        + sum(map(_of_choice, finished.result.choices))
        + _of_prompt(finished.result.prompt)
        + (_of_request(request) if request is not None else 0)
    )


def _of_prompt(prompt: ScoredPrompt | None) -> int:
    if prompt is None:
        return 0
    return len(prompt.token_ids) * (_TOKEN + _per_token(prompt.logprobs))


def _per_token(logprobs: tuple[TokenLogprob, ...] | None) -> int:
    return _LOGPROB + _ALTERNATIVE * len(logprobs[-1].top) if logprobs else 0


def _of_choice(choice: ChoiceResult) -> int:
    return (
        len(choice.text)
        + len(choice.reasoning)
        + _TOKEN * len(choice.call_deltas)
        + len(choice.token_ids) * (_TOKEN + _per_token(choice.logprobs))
    )


def _of_request(request: JobRequest) -> int:
    texts = sum(message.num_chars for message in request.messages or ())
    texts += sum(len(text) for document in request.documents for text in document.values())
    return len(request.prompt or "") + texts + _TOKEN * len(request.prompt_ids or ())
