"""Makes the options of a command from the fields of SamplingParams: each is an option.

Numbers and texts are taken as they are, tuples of them by repeating the option, all else as JSON.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import typer

from tokenmill.cli.inputs import from_json
from tokenmill_schemas.generation import SamplingParams

HELP: Final = {
    "max_tokens": "Largest number of tokens (`--n` counts answers).",
    "min_tokens": "Smallest number of tokens.",
    "temperature": "Sampling temperature; 0 is greedy.",
    "top_p": "Draw from the most likely tokens with this total probability; 0: only the first.",
    "top_k": "Draw from this many of the most likely tokens; 0: from all.",
    "min_p": "Least probability, as a share of the most likely token's.",
    "seed": "The same seed gives the same text.",
    "thinking_budget": "Largest number of tokens of the model's thoughts.",
    "stop": "Stop before this text; may be repeated.",
    "stop_token_ids": "Stop at this token; may be repeated.",
    "ignore_eos": "Continue after the end token.",
    "presence_penalty": "Subtracted from the logit of each token that occurred.",
    "frequency_penalty": "Subtracted from a token's logit for each occurrence.",
    "repetition_penalty": "Values above 1 make tokens that occurred less likely.",
    "logit_bias": 'JSON, {"token id": bias}.',
    "bad_words_ids": "JSON, lists of token ids that do not occur.",
    "sequence_bias": "JSON, [[[token id, …], bias of the last one], …].",
    "no_repeat_ngram_size": "No sequence of so many tokens occurs twice.",
    "suppress_tokens": "Never draw this token; may be repeated.",
    "begin_suppress_tokens": "Do not begin with this token; may be repeated.",
    "forced_bos_token_id": "First token of the answer.",
    "forced_eos_token_id": "Token number --max-tokens of the answer; may be repeated.",
    "logprobs": "Number of tokens per position whose log-probabilities are returned.",
    "logprobs_mode": "raw_logprobs: of the model's distribution; processed_logprobs: of the one "
    "drawn from.",
    "prompt_logprobs": "The same for each token of the prompt; the --json result has them.",
    "echo": "Begin the answer with the prompt.",
    "n": "Answers to the same prompt (`-n` is --max-tokens).",
    "lora": "LoRA adapter of the worker.",
}
# the command has others for the first, --logprobs says the second, and drafts change no answer
WITHOUT_OPTION: Final = frozenset(("response_format", "top_logprobs", "speculate"))
_LETTERS: Final = {"max_tokens": ["-n"], "temperature": ["-t"]}


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option for each parameter, in place of its own `sampling`. The
    command gets those that were given, by name.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    kinds = {each.name: _kind(each.type) for each in msgspec.structs.fields(SamplingParams)}
    parameters: list[inspect.Parameter] = []
    for own in inspect.signature(command).parameters.values():
        if own.name == "sampling":
            parameters += [_option(name, kinds[name]) for name in HELP]
        else:
            parameters.append(own.replace(annotation=hints[own.name]))

    def run(*arguments: Any, **values: Any) -> None:
        options = {name: values.pop(name) for name in HELP}
        # zero counts as given: temperature 0 is greedy, and max_tokens 0 is rejected by its name
        given = {name: value for name, value in options.items() if value not in (None, [])}
        for name in given.keys() & {name for name, kind in kinds.items() if kind is dict}:
            given[name] = from_json(given[name], _flag(name))
        command(*arguments, sampling=given, **values)

    described: Any = run
    described.__name__, described.__doc__ = command.__name__, command.__doc__
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {own.name: own.annotation for own in parameters}
    return run


def _kind(kind: Any) -> Any:
    """Return the type of an option for a field: a list where it may be repeated, dict for JSON."""
    if isinstance(kind, types.UnionType):
        *_, kind = (each for each in typing.get_args(kind) if each is not types.NoneType)
    if typing.get_origin(kind) is tuple and (item := typing.get_args(kind)[0]) in (int, str):
        return types.GenericAlias(list, item)
    return kind if kind in (bool, int, float, str) else dict


def _option(name: str, kind: Any) -> inspect.Parameter:
    flags = [_flag(name), *_LETTERS.get(name, ())]
    option = typer.Option(*flags, help=HELP[name], rich_help_panel="Sampling")
    annotated: Any = Annotated  # what a type checker cannot know
    annotation = annotated[(str if kind is dict else kind) | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
