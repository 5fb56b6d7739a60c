"""Abilities of an engine, by which the worker refuses what a request asks for and it lacks."""

from __future__ import annotations

from typing import Final

import msgspec

from tokenmill_schemas.generation import ResponseFormat, SamplingParams

# fields of ResponseFormat, each with a form of structured output
STRUCTURED: Final = ("json_schema", "regex", "grammar", "structural_tag")


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Abilities of one loaded engine. The guide's table of engines is made from them.

    `structured` are fields of ResponseFormat. `limits` gives the least and the greatest value that
    a request may name for a parameter, where the engine takes less than the queue does. No request
    asks for `exact_resume`: it tells operators whether a seed gives the same answer across workers.
    """

    structured: tuple[str, ...] = ()  # enforced by a grammar at each token
    tool_grammars: bool = False  # tools, whose calls a grammar binds
    thinking_budget: bool = False  # a limit on the tokens of thoughts
    scores: bool = False  # log-probabilities of given continuations
    prompt_logprobs: bool = False  # log-probabilities of the prompt, also with `echo`
    adapters: bool = False  # LoRA adapters, by `lora` or as the model
    exact_resume: bool = False  # an answer drawn by a seed has the same tokens across workers
    media: tuple[str, ...] = ()  # media in a prompt, such as pictures
    unavailable: tuple[str, ...] = ()  # parameters that no request may name
    limits: dict[str, tuple[float, float]] = {}  # parameters with narrower bounds

    def words(self) -> list[str]:
        """Return the name of each ability, and the bounds of each limited parameter."""
        kinds = [f"response_format.{kind}" for kind in self.structured]
        names = [name for name in self.__struct_fields__ if getattr(self, name) is True]
        return [*kinds, *names, *self.media, *self.words_of_limits()]

    def words_of_limits(self) -> list[str]:
        return [f"{name} {least:g} to {most:g}" for name, (least, most) in self.limits.items()]

    def lacking(self) -> set[str]:
        """Return what no request may ask for, by the names that a job has for it."""
        abilities = {
            **{f"response_format.{kind}": kind in self.structured for kind in STRUCTURED},
            "tools": self.tool_grammars,
            "thinking_budget": self.thinking_budget,
            "continuations": self.scores,
            "prompt_logprobs": self.prompt_logprobs,
            "echo with log-probabilities": self.prompt_logprobs,
            "lora": self.adapters,
            **dict.fromkeys(self.unavailable, False),
        }
        return {name for name, is_there in abilities.items() if not is_there}

    def problems(
        self, params: SamplingParams, *, calls_tools: bool = False, scores: bool = False
    ) -> list[str]:
        """Return one sentence for each thing that a request asks for and the engine lacks."""
        neutral, lacking = SamplingParams(), self.lacking()
        asked = {
            **{f"response_format.{kind}": True for kind in _kinds_of(params.response_format)},
            "tools": calls_tools,
            "thinking_budget": params.thinking_budget is not None,
            "continuations": scores,
            "prompt_logprobs": params.prompt_logprobs is not None,
            "echo with log-probabilities": params.echo and params.wants_logprobs,
            "lora": bool(params.lora),
            **{name: getattr(params, name) != getattr(neutral, name) for name in self.unavailable},
        }
        found = [
            f"{name} is not available on the engine of this queue"
            for name, is_asked in asked.items()
            if is_asked and name in lacking
        ]
        for name, (least, most) in self.limits.items():
            value = getattr(params, name)
            if isinstance(value, int | float) and not least <= value <= most:
                found.append(
                    f"{name} must be between {least:g} and {most:g} with the engine of this queue, "
                    f"not {value:g}"
                )
        return found


def _kinds_of(form: ResponseFormat | None) -> list[str]:
    return [] if form is None else [kind for kind in STRUCTURED if getattr(form, kind) is not None]
