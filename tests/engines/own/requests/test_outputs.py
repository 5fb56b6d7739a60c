"""Collected outputs: complete, in order, each token kept once."""

import sys

import pytest

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.own.requests.outputs import Outputs


def event(request_id="a", choice=0, tokens=(), reason=None, cached=0):
    return TokenEvent(
        request_id=request_id,
        choice=choice,
        token_ids=tuple(tokens),
        finish_reason=reason,
        num_cached_tokens=cached,
    )


def test_events_grow_into_one_output():
    outputs = Outputs()
    outputs.open("a", num_prompt_tokens=3, n=1, wants_logprobs=False)
    outputs.deliver([event(tokens=[1], cached=2), event(request_id="other", tokens=[9])])
    assert outputs.take("a") is None
    outputs.deliver([event(tokens=[2, 3], reason=FinishReason.LENGTH)])
    output = outputs.take("a")
    assert output is not None
    assert output.token_ids == (1, 2, 3)
    assert output.num_cached_tokens == 2
    assert output.finish_reason is FinishReason.LENGTH
    assert output.logprobs is None
    assert "a" not in outputs


def test_a_request_is_finished_when_its_last_choice_is():
    outputs = Outputs()
    outputs.open("a", 1, n=2, wants_logprobs=False)
    outputs.deliver([event(choice=1, tokens=[5], reason=FinishReason.STOP)])
    assert not outputs.is_finished("a")
    outputs.deliver([event(choice=0, tokens=[6], reason=FinishReason.LENGTH)])
    output = outputs.take()
    assert output is not None
    assert [choice.token_ids for choice in output.choices] == [(6,), (5,)]


def test_nothing_is_added_after_the_end():
    outputs = Outputs()
    outputs.open("a", 1, n=1, wants_logprobs=False)
    outputs.deliver([event(tokens=[1], reason=FinishReason.CANCELLED), event(tokens=[2])])
    output = outputs.take("a")
    assert output is not None
    assert output.token_ids == (1,)


def test_take_gives_results_in_the_order_of_their_end():
    outputs = Outputs()
    for name in "ab":
        outputs.open(name, 1, 1, wants_logprobs=False)
    outputs.deliver([event("b", reason=FinishReason.STOP)])
    outputs.deliver([event("a", reason=FinishReason.STOP)])
    taken = [outputs.take(), outputs.take()]
    assert [output.request_id for output in taken if output] == ["b", "a"]
    assert outputs.take() is None


def test_an_unknown_request_is_a_key_error():
    with pytest.raises(KeyError):
        Outputs().take("nobody")


def test_a_reader_gets_every_token_once_however_late_it_comes():
    outputs = Outputs()
    outputs.open("a", 1, n=2, wants_logprobs=False)
    outputs.deliver([event(tokens=[1], cached=1), event(tokens=[2]), event(choice=1, tokens=[7])])
    cursors = {}
    assert list(outputs.read("a", cursors)) == [
        event(tokens=[1, 2], cached=1),
        event(choice=1, tokens=[7]),
    ]
    assert list(outputs.read("a", cursors)) == []
    outputs.deliver([event(tokens=[3]), event(choice=1, reason=FinishReason.CANCELLED)])
    assert list(outputs.read("a", cursors)) == [
        event(tokens=[3]),
        event(choice=1, reason=FinishReason.CANCELLED),
    ]
    outputs.deliver([event(tokens=[4], reason=FinishReason.LENGTH)])
    assert list(outputs.read("a", cursors)) == [event(tokens=[4], reason=FinishReason.LENGTH)]
    assert list(outputs.read("a", cursors)) == []


def test_nothing_is_kept_of_an_event_but_its_tokens():
    """A long answer that is not streamed costs a list of integers."""
    outputs = Outputs()
    outputs.open("a", 1, 1, wants_logprobs=False)
    said = event(tokens=[1])
    for _ in range(100):
        outputs.deliver([said])
    assert sys.getrefcount(said) == 2  # the name, and the argument of this call


def test_a_result_taken_by_its_name_leaves_nothing_behind():
    outputs = Outputs()
    for _ in range(3):
        outputs.open("a", num_prompt_tokens=3, n=1, wants_logprobs=False)
        assert outputs.take() is None
        outputs.deliver([event(tokens=[1], reason=FinishReason.LENGTH)])
        assert outputs.take("a") is not None
    outputs.open("a", num_prompt_tokens=3, n=1, wants_logprobs=False)
    outputs.deliver([event(reason=FinishReason.LENGTH)])
    outputs.discard("a")
    assert outputs.take() is None
