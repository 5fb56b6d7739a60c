"""Tests of requests and their ends, which an engine can pass before it has a distribution."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from tests.engines.conformance.conftest import LENGTH, PLACES
from tests.engines.conformance.driver import PROMPT, EngineUnderTest, one, request
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.messages import CancelRequest


def test_an_answer_has_max_tokens_and_one_end(engine: EngineUnderTest) -> None:
    answer = one(engine)
    assert (len(answer.token_ids), answer.finish_reason) == (8, FinishReason.LENGTH)
    assert answer.token_ids == one(engine).token_ids


def test_an_answer_without_max_tokens_fills_the_context(engine: EngineUnderTest) -> None:
    prompt = (100, 101) * (LENGTH // 2 - 3) + (102,)
    answer = one(engine, prompt=prompt, max_tokens=None)
    assert (len(answer.token_ids), answer.finish_reason) == (5, FinishReason.LENGTH)


def test_greedy_choices_are_equal_and_done_ones_do_not_run(engine: EngineUnderTest) -> None:
    wanted = request(n=3, done=(1,))
    first, third = engine.answer(wanted)
    assert first.token_ids == third.token_ids
    assert (wanted.request_id, 1) not in engine.answers


def test_a_resumed_choice_goes_on_behind_its_tokens(engine: EngineUnderTest) -> None:
    whole = one(engine).token_ids
    for cut in (1, 4, 7):
        assert one(engine, resumed=(tuple(whole[:cut]),)).token_ids == whole[cut:]


def test_a_stop_token_ends_an_answer_and_is_reported(engine: EngineUnderTest) -> None:
    whole = one(engine).token_ids
    answer = one(engine, stop_token_ids=(whole[3],))
    end = whole.index(whole[3]) + 1
    assert (answer.token_ids, answer.finish_reason) == (whole[:end], FinishReason.STOP)


def test_min_tokens_keep_a_stop_token_from_ending_an_answer(engine: EngineUnderTest) -> None:
    stop = one(engine).token_ids[0]
    answer = one(engine, stop_token_ids=(stop,), min_tokens=6)
    assert len(answer.token_ids) >= 6


REFUSED = {
    "an empty prompt": {"prompt": ()},
    "a prompt id beyond the vocabulary": {"prompt": (10**8,)},
    "a negative prompt id": {"prompt": (-1,)},
    "a prompt as long as the context": {"prompt": (5,) * LENGTH},
    "more tokens than the context has": {"max_tokens": LENGTH},
    "no tokens": {"max_tokens": 0},
    "no choices": {"n": 0},
    "too many choices": {"n": 1_000},
    "a temperature that is no number": {"temperature": math.nan},
    "a negative temperature": {"temperature": -1.0},
    "a top_p above 1": {"top_p": 1.5},
    "a stop id beyond the vocabulary": {"stop_token_ids": (10**8,)},
    "thousands of stop ids": {"stop_token_ids": (10**8,) * 5_000},
    "a bias that is no number": {"logit_bias": {5: math.nan}},
    "an unknown adapter": {"lora": "nobody"},
    "a resumed answer that is complete": {"resumed": ((5,) * 8,)},
    "given tokens of another number of choices": {"n": 2, "given": ((5,),)},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_a_bad_request_ends_alone_with_a_sentence(
    engine: EngineUnderTest, fields: dict[str, Any]
) -> None:
    good = request()
    refused, *rest = engine.answer_all([request(**fields), good])
    assert refused[0].finish_reason is FinishReason.ERROR
    assert refused[0].error
    assert len(refused[0].error) < 1_000
    assert refused[0].error_code in ("invalid_request", "context_length_exceeded")
    assert len(rest[0][0].token_ids) == 8


def test_a_cancelled_request_ends_and_others_go_on(engine: EngineUnderTest) -> None:
    long, other = request(max_tokens=400), request(max_tokens=60)
    engine.submit(long, other)
    key = (long.request_id, 0)
    engine.until(lambda: len(engine.of(key).token_ids) >= 5)
    engine.send(CancelRequest(long.request_id, FinishReason.CANCELLED))
    engine.until(lambda: engine.answers[key].finish_reason is not None)
    assert engine.answers[key].finish_reason is FinishReason.CANCELLED
    engine.until(lambda: engine.answers[other.request_id, 0].finish_reason is not None)
    assert len(engine.answers[other.request_id, 0].token_ids) == 60


def test_one_choice_is_cancelled_alone(engine: EngineUnderTest) -> None:
    wanted = request(n=2, max_tokens=100)
    engine.submit(wanted)
    keys = [(wanted.request_id, choice) for choice in (0, 1)]
    engine.until(lambda: all(engine.of(key).token_ids for key in keys))
    engine.send(CancelRequest(wanted.request_id, FinishReason.STOP, 1))
    engine.until(lambda: all(engine.answers[key].finish_reason for key in keys))
    assert engine.answers[keys[1]].finish_reason is FinishReason.STOP
    assert len(engine.answers[keys[0]].token_ids) == 100


def test_a_cancel_of_what_is_not_there_changes_nothing(engine: EngineUnderTest) -> None:
    ended = request()
    engine.answer(ended)
    for name in (ended.request_id, "nobody"):
        engine.send(CancelRequest(name, FinishReason.CANCELLED))
    assert len(one(engine).token_ids) == 8
    assert engine.answers[ended.request_id, 0].finish_reason is FinishReason.LENGTH


def test_a_request_whose_deadline_passes_ends_as_expired(engine: EngineUnderTest) -> None:
    answer = one(engine, max_tokens=None, deadline=time.monotonic() + 0.1)
    assert answer.finish_reason is FinishReason.EXPIRED


def test_a_deadline_holds_while_commands_arrive(engine: EngineUnderTest) -> None:
    long = request(max_tokens=900, deadline=time.monotonic() + 0.3)
    engine.submit(long)
    key = (long.request_id, 0)
    for _ in range(200):
        engine.send(CancelRequest("nobody", FinishReason.CANCELLED))
        engine.report()
        if engine.of(key).finish_reason:
            break
        time.sleep(0.02)
    assert engine.of(key).finish_reason is FinishReason.EXPIRED


def test_a_request_that_is_cancelled_at_once_ends(engine: EngineUnderTest) -> None:
    wanted = request(max_tokens=400)
    engine.submit(wanted)
    engine.send(CancelRequest(wanted.request_id, FinishReason.CANCELLED))
    key = (wanted.request_id, 0)
    engine.until(lambda: engine.of(key).finish_reason is not None)
    assert engine.answers[key].finish_reason is FinishReason.CANCELLED


def test_choices_beyond_the_places_wait_and_are_cancelled_too(engine: EngineUnderTest) -> None:
    wanted = [request(prompt=(i, *PROMPT), max_tokens=400) for i in range(2 * PLACES)]
    engine.submit(*wanted)
    full = (PLACES, PLACES, 0)

    def figures() -> tuple[int, int, int]:
        last = engine.frames[-1].capacity
        return last.running, last.waiting, last.free_sequences

    engine.until(lambda: bool(engine.frames) and figures() == full)
    for item in wanted:
        engine.send(CancelRequest(item.request_id, FinishReason.CANCELLED))
    keys = [(item.request_id, 0) for item in wanted]
    engine.until(lambda: all(engine.of(key).finish_reason for key in keys))
    assert {engine.answers[key].finish_reason for key in keys} == {FinishReason.CANCELLED}
    assert len(one(engine).token_ids) == 8


def test_nothing_is_lost_when_reports_are_not_read_for_a_while(engine: EngineUnderTest) -> None:
    wanted = [request(prompt=(i, *PROMPT), max_tokens=100) for i in range(PLACES)]
    engine.submit(*wanted)
    time.sleep(3)  # the socket is full by then
    keys = [(item.request_id, 0) for item in wanted]
    engine.until(lambda: all(engine.of(key).finish_reason for key in keys), 300)
    assert [len(engine.answers[key].token_ids) for key in keys] == [100] * PLACES


def test_an_idle_engine_reports_its_capacity(engine: EngineUnderTest) -> None:
    one(engine)
    before = len(engine.frames)
    engine.until(lambda: len(engine.frames) >= before + 3, 30)
    assert all(frame.ended_s > 0 for frame in engine.frames[before:])  # else it would hang
    last = engine.frames[-1].capacity
    assert (last.running, last.waiting, last.free_sequences) == (0, 0, PLACES)
    assert last.max_model_len == LENGTH
