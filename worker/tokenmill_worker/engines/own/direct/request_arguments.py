"""Reads the arguments of a request to the manager: prompt, end tokens, sampling, choices."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final

import msgspec

from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.params_validation import MAX_CHOICES
from tokenmill_worker.contract.requests import RequestError, choice_seed

# fields of a GenerationConfig that SamplingParams has by the same name, with tuples for lists
TOKEN_RULES: Final = (
    "bad_words_ids", "sequence_bias", "no_repeat_ngram_size", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip


def token_rules(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingParams that favour, forbid or force tokens, from Transformers'
    forms: lists, biases as a list or as a map, and 0 for no n-grams.

    Raises ValueError for another shape.
    """
    named = {name: given[name] for name in TOKEN_RULES if given.get(name) is not None}
    if isinstance(biases := named.get("sequence_bias"), Mapping):
        named["sequence_bias"] = list(biases.items())
    if named.get("no_repeat_ngram_size") == 0:
        del named["no_repeat_ngram_size"]
    try:
        read = msgspec.convert(named, SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"{', '.join(named)} cannot be read: {error}") from error
    return {name: getattr(read, name) for name in named}


def end_tokens(eos_token_id: int | Seq[int]) -> dict[str, Any]:
    """Return the fields of SamplingParams for these end tokens; a negative id is none."""
    ids = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    return {"ignore_eos": True, "stop_token_ids": tuple(one for one in ids if one >= 0)}


def sampling(
    params: SamplingParams,
    max_new_tokens: int | None,
    eos_token_id: int | Seq[int] | None,
    fields: Mapping[str, Any],
) -> SamplingParams:
    """Return `params` with what a request says otherwise; `fields` are its fields by name.

    Raises TypeError for a name that SamplingParams does not have, and ValueError for token ids of
    another shape.
    """
    changes = {**fields, **token_rules(fields)}
    if unknown := changes.keys() - set(SamplingParams.__struct_fields__):
        raise TypeError(f"a request has no argument {', '.join(sorted(unknown))}")
    if max_new_tokens is not None:
        changes["max_tokens"] = max_new_tokens
    if eos_token_id is not None:
        changes |= end_tokens(eos_token_id)
    return msgspec.structs.replace(params, **changes)


def prompt_ids(given: Seq[int]) -> tuple[tuple[int, ...], RequestError | None]:
    """Return the ids as integers; for anything else, none and the reason why it is refused."""
    try:
        return tuple(map(operator.index, given)), None
    except TypeError:
        shown = repr(given)
        shown = shown if len(shown) <= 64 else shown[:61] + "..."
        return (), RequestError(f"input_ids must be a list of token ids, not {shown}")


def seeds(seed: int) -> Iterator[int]:
    """Yield different seeds that follow from one."""
    return (choice_seed(seed, number) for number in itertools.count())


def choice_ids(request_id: str, num_choices: int) -> list[str]:
    """Return the id of each choice of a request."""
    return [request_id, *(f"{request_id}__child#{n}" for n in range(num_choices - 1))]


def choices(
    request_id: str, params: SamplingParams, unnamed_seeds: Iterator[int | None]
) -> list[tuple[str, SamplingParams]]:
    """Return the id and the parameters of each choice; a choice without a seed takes the next one.

    A number of choices that the engine refuses stays in the parameters.
    """
    if not (isinstance(params.n, int) and 1 <= params.n <= MAX_CHOICES):
        return [(request_id, params)]
    return [
        (
            each,
            msgspec.structs.replace(
                params,
                n=1,
                seed=next(unnamed_seeds) if params.seed is None else choice_seed(params.seed, n),
            ),
        )
        for n, each in enumerate(choice_ids(request_id, params.n))
    ]
