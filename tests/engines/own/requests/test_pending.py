"""Requests that wait for a grammar expire, are cancelled like others, and delay no others."""

import dataclasses
import time
from concurrent.futures import Future

import pytest

from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams
from tokenmill_worker.contract.requests import Prompt
from tokenmill_worker.engines.own import EngineConfig, GenerationRequest, RequestError
from tokenmill_worker.engines.own.config.capabilities import CAPABILITIES
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner

STRUCTURED = SamplingParams(max_tokens=5, response_format=ResponseFormat(regex="a"))


class SlowlyPreparing(SyntheticRunner):
    """Grammars are ready when a test says so."""

    grammar: Future[object]
    tenants: list[str]

    def prepare(self, params: SamplingParams, tenant: str = "") -> Future[object]:
        self.tenants.append(tenant)
        return self.grammar


@pytest.fixture
def pending():
    runner = SlowlyPreparing.load(
        EngineConfig(model="synthetic", num_blocks=64, block_size=8, max_num_seqs=8)
    )
    runner.info = dataclasses.replace(runner.info, capabilities=CAPABILITIES)
    runner.grammar, runner.tenants = Future(), []
    with CollectingEngine.around(runner) as engine:
        yield engine
        runner.grammar.set_exception(ValueError("over"))


def test_a_request_expires_while_its_grammar_is_compiled(pending):
    now = time.monotonic()
    late = GenerationRequest(
        request_id="late", prompt=Prompt((1, 2)), params=STRUCTURED, deadline=now - 1
    )
    early = GenerationRequest(
        request_id="early", prompt=Prompt((1, 2)), params=STRUCTURED, deadline=now + 3600
    )
    pending.submit([late, early])
    events = pending.step()
    events += pending.step()
    assert [(event.request_id, event.finish_reason) for event in events] == [
        ("late", FinishReason.EXPIRED)
    ]
    assert pending.waits_only
    assert pending.request_ids() == ["early"]


def test_one_choice_is_cancelled_while_a_grammar_is_compiled(pending):
    params = SamplingParams(max_tokens=5, n=3, response_format=ResponseFormat(regex="a"))
    pending.submit([GenerationRequest(request_id="x", prompt=Prompt((1, 2)), params=params)])
    assert pending.cancel("x", choice=1)
    assert not pending.cancel("x", choice=1)
    events = pending.step()
    assert [(event.choice, event.finish_reason) for event in events] == [
        (1, FinishReason.CANCELLED)
    ]
    assert pending.request_ids() == ["x"]
    assert pending.cancel("x")
    events = pending.step()
    assert [(event.choice, event.finish_reason) for event in events] == [
        (0, FinishReason.CANCELLED), (2, FinishReason.CANCELLED),
    ]  # fmt: skip
    assert pending.request_ids() == []


def test_a_duplicate_id_is_refused_while_the_first_waits_for_its_grammar(pending):
    for _ in range(2):
        request = GenerationRequest(request_id="x", prompt=Prompt((1, 2)), params=STRUCTURED)
        pending.submit([request])
    (refusal,) = pending.step()
    assert refusal.error == "request id 'x' is already in use"
    assert pending.request_ids() == ["x"]


@pytest.mark.parametrize("code", ["invalid_request", "engine_error"])
def test_a_grammar_that_fails_ends_its_request_with_its_code(pending, code):
    pending.submit([GenerationRequest(request_id="x", prompt=Prompt((1, 2)), params=STRUCTURED)])
    pending.runner.grammar.set_exception(RequestError("too late", code))
    pending.runner.grammar, failed = Future(), pending.runner.grammar
    (event,) = pending.step()
    assert failed.done()
    assert (event.error, event.error_code) == ("response_format cannot be used: too late", code)


def test_a_grammar_is_compiled_in_its_tenant_s_turn(pending):
    request = GenerationRequest(
        request_id="x", prompt=Prompt((1, 2)), params=STRUCTURED, tenant="acme"
    )
    pending.submit([request])
    assert pending.runner.tenants == ["acme"]


def test_a_request_whose_choices_are_all_done_is_refused(pending):
    pending.submit([GenerationRequest(request_id="r", prompt=Prompt((1, 2)), done=(0,))])
    (event,) = pending.step()
    assert "every choice of it is done" in event.error
