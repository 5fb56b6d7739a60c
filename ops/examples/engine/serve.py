"""Serves a model that continues the alphabet, as an engine serves a real one."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from ops.examples.engine.config import ExampleConfig
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import Capacity, EngineStats, TokenEvent
from tokenmill_worker.contract.messages import (
    CancelRequest,
    Frame,
    Mailbox,
    Ready,
    Report,
    Start,
    Stop,
    Submit,
)
from tokenmill_worker.contract.requests import GenerationRequest, RequestError
from tokenmill_worker.engines.limits import ModelLimits

END, VOCAB_SIZE = 256, 257  # a token is a byte
Choice = tuple[str, int]  # the id of its request, and its index
Choices = dict[Choice, tuple[GenerationRequest, Iterator[TokenEvent]]]


def event(choice: Choice, reason: FinishReason | None, **fields: Any) -> TokenEvent:
    return TokenEvent(request_id=choice[0], choice=choice[1], finish_reason=reason, **fields)


def answer(request: GenerationRequest, index: int, limit: int) -> Iterator[TokenEvent]:
    params, resumed = request.params, dict(enumerate(request.resumed)).get(index, ())
    last = (*request.prompt.token_ids, *resumed)[-1]
    ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, END)
    for count in range(len(resumed) + 1, limit + 1):
        last = last + 1 if 97 <= last < 122 else END if last == 122 else 97  # the model
        is_end = last in ends and count >= params.min_tokens
        reason = FinishReason.STOP if is_end else FinishReason.LENGTH if count == limit else None
        yield event((request.request_id, index), reason, token_ids=(last,))


def begin(choices: Choices, request: GenerationRequest, length: int) -> list[TokenEvent]:
    try:
        limit = ModelLimits(VOCAB_SIZE, length, can_structure=False).check(request)
        if request.params.lora:
            raise RequestError("this engine has no adapters")
    except RequestError as error:
        return [error.event(request.request_id)]
    for index in set(range(request.params.n)) - set(request.done):
        choices[request.request_id, index] = request, answer(request, index, limit)
    return []


def step(choices: Choices, places: int) -> list[TokenEvent]:
    time.sleep(0.002)  # as long as a model computes
    now, events = time.monotonic(), list[TokenEvent]()
    for place, (choice, (request, tokens)) in enumerate(choices.items()):
        if request.deadline is not None and request.deadline <= now:
            events.append(event(choice, FinishReason.EXPIRED))
        elif place < places:
            events.append(next(tokens))
    for ended in filter(lambda found: found.finish_reason, events):
        del choices[ended.request_id, ended.choice]
    return events


def capacity(choices: Choices, places: int, length: int) -> Capacity:
    free = max(0, places - len(choices))
    return Capacity(
        free_sequences=free, free_urgent=free, free_blocks=free * length, block_size=1,
        running=places - free, waiting=len(choices) - places + free, max_model_len=length,
    )  # fmt: skip


def serve(start: Start, mailbox: Mailbox, emit: Callable[[Report], None]) -> int:
    config, choices = ExampleConfig(**start.settings), Choices()
    length, places = config.max_model_len or 4096, config.max_num_seqs
    emit(Ready(
        model=config.model, model_path=config.model, description="continues the alphabet",
        max_model_len=length, max_num_seqs=places, vocab_size=VOCAB_SIZE, eos_token_ids=(END,),
        capacity=capacity(choices, places, length),
    ))  # fmt: skip
    while True:
        events: list[TokenEvent] = []
        for command in mailbox.take_all(timeout=0.0 if choices else 0.5):
            match command:
                case Stop():
                    return 0
                case Submit(requests):
                    events += [found for one in requests for found in begin(choices, one, length)]
                case CancelRequest(name, reason, index):
                    meant = [key for key in choices if key[0] == name and index in (None, key[1])]
                    events += [event(key, reason) for key in meant if choices.pop(key)]
        events += step(choices, places)
        load, now = capacity(choices, places, length), time.monotonic()
        emit(Frame(events=tuple(events), capacity=load, stats=EngineStats(), ended_s=now))
