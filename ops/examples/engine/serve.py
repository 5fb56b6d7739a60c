"""Serves a model that continues the alphabet, as an engine serves a real one."""

import time
from collections.abc import Callable

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
from tokenmill_worker.engines.choices import RunningChoice, RunningChoices
from tokenmill_worker.engines.limits import ModelLimits

END, VOCAB_SIZE = 256, 257  # a token is a byte
Choices = RunningChoices[RunningChoice]


def draw(choice: RunningChoice) -> TokenEvent:
    params, last = choice.request.params, (choice.drawn or choice.prompt_ids)[-1]
    token = last + 1 if 97 <= last < 122 else END if last == 122 else 97  # the model
    ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, END)
    if token in ends and choice.num_required <= 1:
        return choice.drew((token,), FinishReason.STOP)
    return choice.drew((token,), FinishReason.LENGTH if choice.num_left == 1 else None)


def step(choices: Choices, places: int) -> list[TokenEvent]:
    time.sleep(0.002)  # as long as a model computes
    choices.end(choices.late(time.monotonic()), FinishReason.EXPIRED)
    events = choices.taken_events()
    for key, choice in list(choices.items())[:places]:
        events.append(draw(choice))
        if events[-1].finish_reason:
            del choices[key]
    return events


def capacity(choices: Choices, places: int, length: int) -> Capacity:
    free = max(0, places - len(choices))
    return Capacity(
        free_sequences=free, free_urgent=free, free_blocks=free * length, block_size=1,
        running=places - free, waiting=len(choices) - places + free, max_model_len=length,
    )  # fmt: skip


def serve(start: Start, mailbox: Mailbox, emit: Callable[[Report], None]) -> int:
    config = ExampleConfig(**start.settings)
    length, places = config.max_model_len or 4096, config.max_num_seqs
    choices = Choices(ModelLimits(VOCAB_SIZE, length, can_structure=False), RunningChoice)
    emit(Ready(
        model=config.model, model_path=config.model, description="continues the alphabet",
        max_model_len=length, max_num_seqs=places, vocab_size=VOCAB_SIZE, eos_token_ids=(END,),
        capacity=capacity(choices, places, length),
    ))  # fmt: skip
    while True:
        for command in mailbox.take_all(timeout=0.0 if choices else 0.5):
            match command:
                case Stop():
                    return 0
                case Submit(requests):
                    for request in requests:
                        for choice in choices.of_request(request):
                            choices.add(choice)
                case CancelRequest():
                    choices.end(choices.of(command), command.reason)
        events = step(choices, places)
        load, now = capacity(choices, places, length), time.monotonic()
        emit(Frame(events=tuple(events), capacity=load, stats=EngineStats(), ended_s=now))
