"""Builds the chaos tests' jobs: kinds with the answers of an undisturbed run, and twists.

Every job's expectation follows from its kind and its twist alone.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tests.chaos.checker import Wanted
from tests.fuzz.jobs.texts import draw_text
from tokenmill import AsyncClient

NUM_KINDS = 24
NUM_REAL_KINDS = 6
NUM_TINY_KINDS = 16
TENANTS = ("t0", "t1", "{q}", "a:b", "a%3Ab", "", "*", "é 漢")
FAR_S = 3_000.0  # a deadline that no job reaches, nearer than the longest jump of a clock
CLOCK_ERROR_MS = 300  # a client's reading of the server's clock, where data is delayed
WEBHOOK = "https://example.org/hook"
NOTHING = (((), ""),)
SOME_STOPS = ("ea", "o t", "zq", "nn", " h", "é")
CRASH = {"prompt": "poison [[crash]]", "max_tokens": 5}
FAIL = {
    "prompt": "poison [[fail]]",
    "max_tokens": 5,
    "retry": {"max_attempts": 2, "backoff_ms": 300},
}


def kind_of_job(number: int) -> dict[str, Any]:
    """Return a job: greedy or sampled, streamed or not, one or several choices, chats, stop
    strings.
    """
    job: dict[str, Any] = {
        "max_tokens": 12 + 5 * number,
        "ignore_eos": number % 2 == 0,
        "seed": number,
    }
    job["temperature"] = 0.0 if number % 3 == 0 else 0.9
    if number % 6 == 4:
        job["messages"] = [{"role": "user", "content": f"question {number}"}]
    else:
        job["prompt"] = f"question {number} " + "and so on " * (number % 5)
    if number % 4 == 1:
        job |= {"n": 2 + number % 2, "temperature": 0.9}
    if number % 5 == 2:
        job["stop"] = SOME_STOPS
    if number % 7 == 3:
        job["logprobs"] = True
    if number % 5 == 0:
        job |= {"stream": False, "priority": "bulk"}
    elif number % 6 == 1:
        job["priority"] = "interactive"
    return job


def kind_of_real_job(number: int) -> dict[str, Any]:
    """Return a job of few tokens, since a step of the real model takes long."""
    job: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Name {number + 2} rivers."}],
        "max_tokens": 16,
    }
    job |= {"temperature": 0.0} if number % 2 == 0 else {"temperature": 0.8, "seed": number}
    if number == 3:
        job |= {"n": 2, "max_tokens": 10}
    if number == 4:
        job |= {"stop": (",",), "max_tokens": 24}
    return job


def with_drawn_prompt(job: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return the job with a random text as its prompt or its message."""
    text = draw_text(chance, 20)[:300] or "漢"  # all fit the model
    if "messages" in job:
        return {**job, "messages": [{"role": "user", "content": text}]}
    return {**job, "prompt": text}


PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "é": {"enum": [1, None, "x"]}},
    "required": ["city", "é"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
_FORMS: tuple[dict[str, Any], ...] = (
    {"response_format": {"json_schema": PLACE}, "max_tokens": 80},
    {"response_format": {"regex": "[a-f]{20,60}(é|漢)+x"}, "max_tokens": 80},
    {"response_format": {"grammar": 'root ::= ("ab" | [c-h])+ "."'}, "max_tokens": 60},
    {"response_format": {"choice": ["yes", "no", "vielleicht"]}, "max_tokens": 20},
    {"messages": [], "tools": TOOLS, "tool_choice": "required", "max_tokens": 100},
    {"messages": [], "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 60},
    {"continuations": [" one", "zwei 2", "漢字"], "stream": False},
    {"continuations": ["a", "bcd"], "logprobs": 3, "stream": False},
    {"prompt_logprobs": 2, "logprobs": True, "max_tokens": 40},
    {"n": 3, "logprobs": 2, "temperature": 0.9, "max_tokens": 50},
    {"stream": False, "priority": "bulk", "max_tokens": 120},
    {"echo": True, "logprobs": True, "max_tokens": 40},
    {"messages": [], "thinking_budget": 5, "max_tokens": 60, "priority": "interactive"},
    {"stop": ["a", "�", "e "], "logit_bias": {97: 3.0, 200: -50.0}, "max_tokens": 60},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "max_tokens": 150},
    {"messages": [], "ignore_eos": True, "max_tokens": 200},
)


def kind_of_tiny_job(number: int) -> dict[str, Any]:
    """Return a job of a form that the model-free engine does not have; its prompt is drawn."""
    job = dict(_FORMS[number])
    if "continuations" not in job:
        job |= {"temperature": 0.9, "seed": number} | job if number % 2 else {"temperature": 0.0}
    return job | ({} if "messages" in job else {"prompt": ""})


@dataclass(frozen=True, slots=True)
class Ask:
    """One job to submit, the twist to apply to it, and the ways in which it may end."""

    arguments: dict[str, Any]
    wanted: Wanted
    is_asked_twice: bool = False
    cancel_after_s: float | None = None


@dataclass(slots=True)
class Workload:
    """`answers[k]` is what an undisturbed run gives for `kinds[k]`."""

    kinds: Sequence[dict[str, Any]]
    answers: Sequence[Any]
    chance: random.Random
    with_poison: bool = True
    _number: int = field(default=0)

    def next(self) -> Ask:
        number, self._number = self._number, self._number + 1
        if self.with_poison and number % 400 == 177:
            return Ask(CRASH, Wanted(NOTHING, 0, frozenset({"dead"})))
        if self.with_poison and number % 67 == 31:
            return Ask(FAIL, Wanted(NOTHING, 0, frozenset({"failed"})))
        kind = self.chance.randrange(len(self.kinds))
        arguments = {**self.kinds[kind], "tenant": TENANTS[number % len(TENANTS)]}
        if number % 2:
            arguments["session"] = f"{{s}}{self.chance.randrange(20)}"
        if has_webhook := number % 9 == 4:
            arguments["webhook"] = WEBHOOK
        return self._twisted(number, arguments, self.answers[kind], has_webhook)

    def _twisted(
        self, number: int, arguments: dict[str, Any], result: Any, has_webhook: bool
    ) -> Ask:
        """Return the job with a twist, mostly none.

        A cancelled or late job may still succeed before that.
        """
        wanted = functools.partial(
            Wanted.of, result, has_webhook=has_webhook, stops=tuple(arguments.get("stop", ()))
        )
        if number % 13 == 5:
            states = frozenset({"cancelled", "succeeded"})
            return Ask(
                arguments,
                wanted(states=states),
                cancel_after_s=self.chance.uniform(0.0, 2.0),
            )
        if number % 17 == 3:
            arguments["deadline"] = self.chance.uniform(0.3, 4.0)
            return Ask(
                arguments,
                wanted(states=frozenset({"expired", "succeeded"})),
            )
        if number % 17 == 9:
            arguments["deadline"] = FAR_S
        if number % 11 == 7:
            delay = timedelta(seconds=self.chance.uniform(0.5, 3.0))
            arguments["not_before"] = delay
            due_ms = int((time.time() + delay.total_seconds()) * 1000) - CLOCK_ERROR_MS
            return Ask(arguments, wanted(not_before_ms=due_ms))
        return Ask(arguments, wanted(), is_asked_twice=number % 7 == 2)


async def undisturbed(client: AsyncClient, kinds: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the results of one job of each kind when nothing disturbs the run."""
    ids = [await client.submit(**kind) for kind in kinds]
    return [await client.result(job, timeout=120) for job in ids]
