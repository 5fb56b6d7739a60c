"""Runs requests through our engine in the caller's thread, and keeps their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenmill_schemas.generation import SamplingParams, TokenLogprob
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own.engine import Engine


@dataclass(slots=True)
class GeneratedAnswer:
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


def submit(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[str]:
    """Add requests together, and return their ids."""
    ids = [f"request-{number}" for number in range(len(prompts))]
    engine.submit(
        GenerationRequest(request_id=name, prompt=Prompt(tuple(prompt)), params=one)
        for name, prompt, one in zip(ids, prompts, params, strict=True)
    )
    return ids


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    on_step: Callable[[Sequence[TokenEvent]], None] = lambda _: None,
) -> dict[str, GeneratedAnswer]:
    """Continue every prompt, call `on_step` with each step's events; return the answers by id.

    Raises RuntimeError, with the engine's sentence, for a request that failed.
    """
    answers = {name: GeneratedAnswer() for name in submit(engine, prompts, params)}
    while engine.has_work:
        events = engine.step()
        for event in events:
            if event.error:
                raise RuntimeError(event.error)
            answers[event.request_id].token_ids += event.token_ids
            answers[event.request_id].prompt_logprobs += event.prompt_logprobs
        on_step(events)
    return answers
