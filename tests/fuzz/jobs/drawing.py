"""Draws jobs: each one by the seed of the run and its own number, so that any one can be drawn
again alone.

Most are valid in most fields, so that they reach the engine; each has some values that are wild.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, Final

from tests.fuzz.jobs.formats import draw_format, draw_tools, draw_value
from tests.fuzz.jobs.texts import draw_broken_text, draw_long_text, draw_text
from tests.support.tiny_llama import VOCAB
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import PRIORITY_ORDER

Arguments = dict[str, Any]

PARAMS: Final = frozenset(SamplingParams.__struct_fields__)
SOON_S: Final = 1.5  # the latest `not_before` that a run waits for
_NUMBERS: Final[tuple[Any, ...]] = (
    0, 1, -1, 2, 127, 128, 1_024, 2_047, 2_048, 10**9, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63,
    -(2**63), 2**64 - 1, 2**64, 10**400, 0.0, -0.0, 0.5, 5e-324, 1e-30, 1e30, 1e308, math.nan,
    math.inf, -math.inf, True, None, "1", "nan", [], {},
)  # fmt: skip
# Values that are valid, and nearly all of the range
_PARAMS: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (0, 0.0, 0.7, 1.0, 5e-324, 100.0),
    "top_p": (0.0, 1e-30, 0.5, 0.9, 1.0),
    "top_k": (-1, 0, 1, 5, VOCAB, 10**6),
    "min_p": (0.0, 0.1, 1.0),
    "seed": (0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1),
    "min_tokens": (0, 1, 2, 8),
    "ignore_eos": (True, False),
    "presence_penalty": (-2.0, 0.0, 1.5, 2.0),
    "frequency_penalty": (-2.0, 0.5, 2.0),
    "repetition_penalty": (1e-30, 0.5, 1.2, 100.0),
    "logprobs": (True, False, 0, 1, 5, 100),
    "top_logprobs": (0, 3, 100),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    "prompt_logprobs": (0, 1, 5, 100),
    "echo": (True, False),
    "n": (1, 2, 3, 3, 16, 128),
    "speculate": (True, False),
    "lora": ("", "", "", "none"),
}
_NAMES: Final = ("", "a", "acme", "{q}", "a:b", "a%3Ab", "*", "🦙", "t" * 255)


def draw_arguments(chance: random.Random) -> Arguments:
    """Return the arguments of one `submit`: the kind of job, its parameters, its other fields."""
    arguments = chance.choices(_KINDS, _WEIGHTS)[0](chance)
    arguments.setdefault("max_tokens", _max_tokens(chance))
    if "continuations" not in arguments or chance.random() < 0.1:
        for name in chance.sample(tuple(_PARAMS), chance.choice((0, 1, 2, 3, 5))):
            arguments.setdefault(name, chance.choice(_PARAMS[name]))
        if chance.random() < 0.3:
            arguments |= _lists(chance)
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        name = chance.choice(tuple(_FIELDS))
        arguments.setdefault(name, _FIELDS[name](chance))
    if chance.random() < 0.15:
        name = chance.choice((*_PARAMS, *_FIELDS, "max_tokens", "stop", "logit_bias"))
        arguments[name] = _wild(chance)
    return {name: value for name, value in arguments.items() if value is not None}


def _max_tokens(chance: random.Random) -> Any:
    return None if chance.random() < 0.01 else chance.choice((1, 1, 2, 4, 8, 8))


def _wild(chance: random.Random) -> Any:
    kind = chance.random()
    if kind < 0.6:
        return chance.choice(_NUMBERS)
    if kind < 0.8:
        return draw_value(chance)
    if kind < 0.9:
        return draw_broken_text(chance)
    value: Any = chance.choice((0, "a"))
    for _ in range(chance.choice((5, 70, 1_200))):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return value


# ── kinds of jobs ──


def _prompt(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.01:
        return draw_long_text(chance)
    if kind < 0.02:
        return draw_broken_text(chance)
    return draw_text(chance, 12) or chance.choice(("", "a", "é", "🦙"))


def _plain(chance: random.Random) -> Arguments:
    return {"prompt": _prompt(chance)}


def _ids(chance: random.Random) -> Arguments:
    most = VOCAB if chance.random() < 0.9 else 2**63
    count = chance.choice((0, 1, 1, 7, 7, 40, 40, 300, 2_040, 2_047, 2_048))
    return {"prompt_ids": [chance.randrange(most) for _ in range(count)]}


def _structured(chance: random.Random) -> Arguments:
    return {
        **(_chat if chance.random() < 0.3 else _plain)(chance),
        "response_format": draw_format(chance),
    }


def _chat(chance: random.Random) -> Arguments:
    messages = [_message(chance) for _ in range(chance.choice((1, 1, 2, 3, 5)))]
    if chance.random() < 0.9 and any(message["role"] == "tool" for message in messages):
        call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
        messages.insert(0, {"role": "assistant", "tool_calls": [call]})
    arguments: Arguments = {"messages": messages}
    if chance.random() < 0.2:
        names = ("enable_thinking", "tools", "messages", "chat_template", "tokenize", "x y", "ns")
        value = chance.choice((True, False, draw_value(chance)))
        arguments["chat_template_kwargs"] = {chance.choice(names): value}
    if chance.random() < 0.1:
        arguments["thinking_budget"] = chance.choice((0, 1, 4, 100))
    if chance.random() < 0.1:
        arguments["documents"] = [{draw_text(chance, 1): draw_text(chance)} for _ in range(2)]
    if chance.random() < 0.1:
        arguments["continue_final_message"] = True
    if chance.random() < 0.1:
        arguments["add_generation_prompt"] = chance.random() < 0.3
    return arguments


def _message(chance: random.Random) -> Any:
    role = chance.choices(_ROLES, _ROLE_WEIGHTS)[0]
    content: Any = _prompt(chance)
    if chance.random() < 0.1:
        content = [{"type": "text", "text": draw_text(chance)} for _ in range(2)]
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant" and chance.random() < 0.4:
        arguments = chance.choice(('{"a": 1}', "{}", "{}", '{"é": "</tool_call>"}', "["))
        name = draw_text(chance, 1) or "f"
        message["tool_calls"] = [{"id": "c", "function": {"name": name, "arguments": arguments}}]
    if role == "assistant" and chance.random() < 0.3:
        message["reasoning"] = draw_text(chance)
    if role == "tool":
        message["tool_call_id"] = chance.choice(("c", "c", "c", "c", "d"))
    if chance.random() < 0.03:
        message[chance.choice(("name", "content", "role", "extra"))] = draw_value(chance)
    return message


def _calling(chance: random.Random) -> Arguments:
    arguments = {**_chat(chance), "tools": draw_tools(chance)}
    if chance.random() < 0.7:
        named = {
            "type": "function",
            "function": {"name": arguments["tools"][0]["function"]["name"]},
        }
        arguments["tool_choice"] = chance.choice(("auto", "none", "required", "required", named))
    if chance.random() < 0.3:
        arguments["parallel_tool_calls"] = chance.random() < 0.5
    return arguments


def _scored(chance: random.Random) -> Arguments:
    base = chance.choice((_plain, _plain, _chat, _ids))(chance)
    given: list[Any] = [_continuation(chance) for _ in range(chance.choice((1, 2, 3, 16, 128)))]
    if "prompt_ids" in base:
        given = [[chance.randrange(VOCAB) for _ in range(3)] for _ in given]
    return {**base, "continuations": given, "max_tokens": None}


def _continuation(chance: random.Random) -> str:
    return draw_text(chance, 2) or " a"


_ROLES: Final = ("user", "system", "assistant", "tool", "developer", "x")
_ROLE_WEIGHTS: Final = (50, 10, 20, 10, 5, 0.5)
_KINDS: Final[tuple[Callable[[random.Random], Arguments], ...]] = (
    _plain, _ids, _structured, _chat, _calling, _scored,
)  # fmt: skip
_WEIGHTS: Final = (25, 8, 25, 20, 14, 8)


# ── other fields ──


def _lists(chance: random.Random) -> Arguments:
    return {
        "stop": [
            draw_text(chance, 2) or "x" for _ in range(chance.choice((1, 1, 3, 3, 16, 16, 17)))
        ],
        "stop_token_ids": [chance.randrange(VOCAB) for _ in range(chance.choice((1, 3, 1_024)))],
        "logit_bias": {
            chance.randrange(VOCAB): chance.choice((-100, 100, 0.5))
            for _ in range(chance.choice((1, 3, 200)))
        },
        "bad_words_ids": [_some_ids(chance) for _ in range(chance.choice((0, 1, 40)))],
        "sequence_bias": [
            [_some_ids(chance), chance.choice((-9.5, 4.0))] for _ in range(chance.choice((0, 2)))
        ],
        "suppress_tokens": _some_ids(chance),
        "begin_suppress_tokens": _some_ids(chance),
    }


def _some_ids(chance: random.Random) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(chance.choice((1, 1, 2, 3, 5)))]


def _metadata(chance: random.Random) -> Any:
    count = chance.choice((0, 1, 3, 64, 65))
    return {
        draw_text(chance, 3, with_zero=False) + str(i): draw_text(chance, with_zero=False)
        for i in range(count)
    }


def _moment(chance: random.Random) -> Any:
    return chance.uniform(0.001, 2.0) if chance.random() < 0.8 else chance.choice(_NUMBERS)


def _delay(chance: random.Random) -> Any:
    return chance.uniform(-1.0, SOON_S) if chance.random() < 0.9 else chance.choice(_NUMBERS)


def _job_id(chance: random.Random) -> str:
    name = str(chance.choice((*_NAMES, draw_text(chance, 3))))
    return name if chance.random() < 0.3 else f"{name[:200]}{chance.getrandbits(32)}"


_FIELDS: Final[dict[str, Callable[[random.Random], Any]]] = {
    "tenant": lambda chance: chance.choice((*_NAMES, draw_text(chance, 3))),
    "session": lambda chance: chance.choice((*_NAMES, draw_text(chance, 3))),
    "priority": lambda chance: chance.choice(
        (*PRIORITY_ORDER, *PRIORITY_ORDER, *PRIORITY_ORDER, "urgent")
    ),
    "stream": lambda chance: chance.random() < 0.5,
    "metadata": _metadata,
    "deadline": _moment,
    "not_before": _delay,
    "retry": lambda chance: {
        "max_attempts": chance.choice((1, 1, 2, 2, 3, 3, 100, 100, 101)),
        "backoff_ms": chance.choice((0, 0, 10, 10, 1_000, 1_000, 7 * 86_400_000, -1)),
    },
    "model": lambda chance: chance.choice(("", "", "", "none", draw_text(chance, 2))),
    "job_id": lambda chance: (
        chance.choice((*_NAMES, draw_text(chance, 3)))
        + chance.choice(("", f"{chance.getrandbits(32)}"))
    ),
    "idempotency_key": lambda chance: f"{chance.choice(_NAMES)}{chance.randrange(3_000)}",
    "batch_id": lambda chance: draw_text(chance, 2),
    "traceparent": lambda chance: chance.choice(
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-0-0-0", draw_text(chance, 2))
    ),
    "webhook": lambda chance: chance.choice(
        ("https://example.org/hook", "http://127.0.0.1/", "https://example.org/é", "ftp://x")
    ),
}
