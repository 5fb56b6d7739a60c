"""The synthetic engine served to a worker: what it reports, and how impossible settings end it."""

import gc
import threading

import msgspec

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.builders import start_of
from tokenmill_worker.contract.messages import (
    EngineFailed,
    Frame,
    Mailbox,
    Ready,
    Start,
    Stop,
    Submit,
)
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.synthetic.config import KIND, SyntheticConfig
from tokenmill_worker.engines.synthetic.serve import serve


def reports_of(start, *commands):
    """Return what the engine reports until a Stop after the commands ends it."""
    mailbox, reports, ended = Mailbox(), [], threading.Event()
    for command in commands:
        mailbox.put(command)

    def emit(report):
        reports.append(report)
        if isinstance(report, Frame) and any(event.finish_reason for event in report.events):
            mailbox.put(Stop())

    def run():
        serve(start, mailbox, emit)
        ended.set()

    # of its own: the engine lengthens its thread's time slices
    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(60)
    return reports


def test_a_request_is_answered_and_ready_names_the_abilities_of_the_kind():
    config = SyntheticConfig(model="synthetic?length=100", num_blocks=64)
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
    request = GenerationRequest(request_id="a", prompt=Prompt((65, 66)), params=params)
    ready, *frames = reports_of(start_of(config), Submit((request,)))
    assert isinstance(ready, Ready)
    assert (ready.capabilities, ready.max_model_len) == (KIND.capabilities, 100)
    assert sum(len(event.token_ids) for frame in frames for event in frame.events) == 5


def test_an_option_that_the_model_does_not_have_ends_the_start_with_one_sentence():
    settings = msgspec.to_builtins(SyntheticConfig(model="synthetic"))
    start = Start(engine="synthetic", settings=settings | {"model": "synthetic?speed=9"})
    (report,) = reports_of(start)
    assert isinstance(report, EngineFailed)
    assert report.at_start
    assert "model option speed=9: known are step_ms, token_us, length, mean_tokens" in (
        report.message
    )


def test_an_engine_in_a_thread_leaves_no_object_to_the_process_for_ever():
    """A process that serves one engine after the other, as of tests, keeps none that has ended."""
    frozen = gc.get_freeze_count()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    request = GenerationRequest(request_id="a", prompt=Prompt((65,)), params=params)
    reports_of(start_of(SyntheticConfig(model="synthetic", num_blocks=64)), Submit((request,)))
    assert gc.get_freeze_count() <= frozen
