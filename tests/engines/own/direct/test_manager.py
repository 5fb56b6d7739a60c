"""The manager in its own thread: results from any thread, none lost, none given twice."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from tests.engines.own.direct.conftest import GREEDY, LONG, load
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.engines.own import (
    ContinuousBatchingManager,
    RequestError,
    RequestStatus,
)
from tokenmill_worker.engines.own.direct import results
from tokenmill_worker.engines.own.errors import EngineError


def test_results_are_fetched_in_any_order_and_once(manager):
    ids = [manager.add_request([65 + n, 66], f"r{n}") for n in range(5)]
    assert manager.get_result("r3").request_id == "r3"
    rest = [output.request_id for output in manager]
    assert sorted(rest) == sorted(set(ids) - {"r3"})
    assert manager.get_result("r3") is None
    assert manager.get_result("nobody") is None
    assert manager.get_result() is None


def test_the_manager_gives_the_engine_s_tokens(manager):
    prompts = [[65 + n, 66, 67 + n] for n in range(8)]
    ids = manager.add_requests(prompts)
    found = {one.request_id: one.generated_tokens for one in manager}
    with load() as alone:
        expected = alone.generate_batch(prompts, GREEDY)
    assert [found[name] for name in ids] == [list(one.token_ids) for one in expected]


def test_get_result_returns_none_after_its_timeout(manager):
    manager.add_request([65, 66], "long", max_new_tokens=LONG)
    with manager.pause():
        started = time.monotonic()
        assert manager.get_result("long", timeout=0.05) is None
        assert time.monotonic() - started < 5
    assert len(manager.get_result("long").generated_tokens) == LONG


def test_a_stream_has_one_output_per_token_and_ends(manager):
    manager.add_request([65, 66], "streamed", streaming=True)
    manager.add_request([65, 66], "plain")
    chunks = list(manager.request_id_iter("streamed"))
    assert [len(one.generated_tokens) for one in chunks] == [1, 2, 3, 4, 5, 6]
    assert [one.status for one in chunks[-2:]] == [RequestStatus.DECODING, RequestStatus.FINISHED]
    assert chunks[-1].generated_tokens == manager.get_result("plain").generated_tokens
    assert list(manager.request_id_iter("streamed")) == []


def test_a_cancelled_request_gets_a_result_and_its_stream_ends(manager):
    manager.add_request([65, 66], "a", max_new_tokens=LONG)
    manager.add_request([65, 66], "b", max_new_tokens=LONG, streaming=True)
    with manager.pause():
        manager.cancel_request("a")
        manager.cancel_request("b")
    assert manager.get_result("a").status is RequestStatus.CANCELLED
    assert list(manager.request_id_iter("b"))[-1].status is RequestStatus.CANCELLED
    manager.cancel_request("nobody")


@pytest.mark.parametrize(
    ("ids", "params"),
    [
        (range(65, 65 + 5000), GREEDY),
        ([], GREEDY),
        ([10**9], GREEDY),
        ([65], SamplingParams(top_k=-7)),
        ([65], SamplingParams(temperature=-1.0)),
    ],
    ids=["oversized", "empty", "out of vocabulary", "top_k", "temperature"],
)
def test_an_invalid_request_gets_a_failed_result_and_others_continue(manager, ids, params):
    manager.add_request([65, 66], "good")
    manager.add_request(list(ids), "bad", params=params)
    bad = manager.get_result("bad")
    assert bad.status is RequestStatus.FAILED
    assert bad.error
    assert manager.get_result("good").finish_reason is FinishReason.LENGTH


def test_greedy_and_wide_top_k_are_served(manager):
    wide = SamplingParams(max_tokens=2, top_k=10**6, temperature=0.0, ignore_eos=True)
    manager.add_request([65], "wide", params=wide)
    assert manager.get_result("wide").status is RequestStatus.FINISHED


def test_an_id_in_use_is_refused_and_the_first_request_continues(manager):
    manager.add_request([65], "same")
    with pytest.raises(RequestError, match="in use"):
        manager.add_request([66], "same")
    assert manager.get_result("same").status is RequestStatus.FINISHED
    manager.add_request([66], "same")
    assert manager.get_result("same").status is RequestStatus.FINISHED


@pytest.mark.parametrize("ids", ["a text", [[65, 66]], [1.5], ["a"], None, [65, None]])
def test_a_request_with_a_prompt_of_a_wrong_type_fails_alone(manager, ids):
    manager.add_request([65, 66], "running", max_new_tokens=LONG)
    name = manager.add_request(ids)
    failed = manager.get_result(name)
    assert failed.status is RequestStatus.FAILED
    assert failed.error.startswith("input_ids must be a list of token ids, not ")
    assert len(manager.get_result("running").generated_tokens) == LONG


@pytest.mark.parametrize("params", [{"temperature": "hot"}, {"stop_token_ids": 7}, {"top_k": []}])
def test_a_request_with_a_parameter_of_a_wrong_type_fails_alone(manager, params):
    manager.add_request([65, 66], "running", max_new_tokens=LONG)
    wrong = SamplingParams(max_tokens=2, **params)
    failed = manager.get_result(manager.add_request([65], params=wrong))
    assert failed.status is RequestStatus.FAILED
    assert "cannot be read" in failed.error
    assert len(manager.get_result("running").generated_tokens) == LONG


def test_integers_of_other_libraries_are_accepted_as_token_ids(manager):
    given = (torch.tensor([65, 66]), np.array([65, 66]), range(65, 67))
    found = [manager.get_result(manager.add_request(ids)) for ids in given]
    assert [one.prompt_ids for one in found] == [[65, 66]] * 3
    assert len({tuple(one.generated_tokens) for one in found}) == 1


def test_an_output_has_its_prompt_timestamps_and_token_lists(manager):
    before = time.perf_counter()
    manager.add_request([65, 66], "timed", record_timestamps=True)
    timed = manager.get_result("timed")
    started, ended = timed.lifespan
    assert before <= timed.created_time <= started <= timed.timestamps[0]
    assert timed.timestamps == sorted(timed.timestamps)
    assert timed.timestamps[-1] == ended <= time.perf_counter()
    assert len(timed.timestamps) == len([*timed.generated_tokens, *timed.logprobs]) == 6
    assert manager.get_result(manager.add_request([65, 66])).timestamps is None


def test_states_are_in_the_order_of_a_request_s_life():
    names = ["PENDING", "PREFILLING", "DECODING", "FINISHED", "FAILED", "CANCELLED"]
    assert [status.name for status in sorted(RequestStatus)] == names


def test_an_abandoned_stream_continues_at_its_next_output(manager):
    manager.add_request([65, 66], "streamed", streaming=True)
    first = next(manager.request_id_iter("streamed"))
    second = manager.get_result("streamed")
    rest = list(manager.request_id_iter("streamed"))
    assert [len(one.generated_tokens) for one in (first, second, *rest)] == [1, 2, 3, 4, 5, 6]
    assert rest[-1].status is RequestStatus.FINISHED
    assert manager.get_result("streamed") is None


def test_a_stream_read_by_several_threads_gives_each_output_once(manager):
    manager.add_request([65, 66], "streamed", max_new_tokens=300, streaming=True)
    got = []
    readers = [
        threading.Thread(target=lambda: got.extend(manager.request_id_iter("streamed")))
        for _ in range(4)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert sorted(len(one.generated_tokens) for one in got) == list(range(1, 301))


def test_no_output_is_copied_while_the_lock_is_held(manager, monkeypatch):
    is_held, copy = [], results._Open.output

    def copied(found, num_tokens):
        is_held.append(manager._changed._is_owned())
        return copy(found, num_tokens)

    monkeypatch.setattr(results._Open, "output", copied)
    with manager.pause():
        for name in ("handled", "streamed"):
            manager.add_request([65, 66], name, streaming=True)
        manager.register_result_handler("handled", print)
    assert len(list(manager.request_id_iter("streamed"))) == 6
    manager.stop()
    assert is_held == [False] * 12


def test_stop_finishes_accepted_requests_and_then_refuses_new_ones(engine):
    manager = ContinuousBatchingManager(engine, GREEDY)
    with pytest.raises(EngineError, match="not started"):
        manager.get_result()
    manager.add_request([65], "early")
    manager.start()
    manager.start()
    manager.stop(block=False)
    manager.join(30)
    assert not manager.is_running()
    assert manager.get_result("early").status is RequestStatus.FINISHED
    with pytest.raises(EngineError, match="stopping"):
        manager.add_request([65])


def test_an_exception_in_the_manager_s_context_cancels_unfinished_requests(engine):
    manager = ContinuousBatchingManager(engine, GREEDY)
    with pytest.raises(RequestError), manager:
        manager.register_result_handler(manager.add_request([65], "long", LONG) + "er", print)
    assert not manager.is_running()
    assert manager.get_result("long").status is RequestStatus.CANCELLED


def test_every_waiting_call_raises_if_the_loop_dies(engine):
    manager = ContinuousBatchingManager(engine, GREEDY)
    manager.start()
    raised = []

    def wait(call):
        try:
            call()
        except EngineError as error:
            raised.append(error)

    with manager.pause():
        manager.add_request([65], "a")
        manager.add_request([65], "b", streaming=True)
        calls = [
            lambda: manager.get_result("a"),
            manager.get_result,
            lambda: list(manager),
            lambda: list(manager.request_id_iter("b")),
        ]
        threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        engine.scheduler.plan = None  # the next step raises TypeError
    for thread in threads:
        thread.join(20)
    assert len(raised) == 4
    assert all(isinstance(error.__cause__, TypeError) for error in raised)
    with pytest.raises(EngineError, match="loop has failed"):
        manager.add_request([65])
    del engine.scheduler.plan


def test_handlers_get_partial_outputs_and_the_result(manager):
    got, ended = [], threading.Event()

    def handle(output):
        got.append(output)
        if output.is_finished():
            ended.set()

    with manager.pause():
        manager.add_request([65], "handled", streaming=True)
        manager.register_result_handler("handled", handle)
    assert ended.wait(20)
    assert len(got[-1].generated_tokens) == 6
    assert len(got) > 1
    assert manager.get_result("handled") is None
    with pytest.raises(RequestError, match="not known"):
        manager.register_result_handler("nobody", print)


def test_a_handler_registered_in_a_coroutine_runs_in_its_loop(manager):
    async def main():
        found = asyncio.get_running_loop().create_future()
        with manager.pause():
            manager.add_request([65], "handled")
            manager.register_result_handler("handled", found.set_result)
        return await asyncio.wait_for(found, 20)

    assert asyncio.run(main()).status is RequestStatus.FINISHED


@pytest.mark.timeout(240)
def test_16_threads_get_each_of_10000_results_once():
    each, threads, got = 625, 16, [[] for _ in range(16)]
    with (
        load(num_blocks=2048, max_num_seqs=256, max_num_batched_tokens=2048) as engine,
        ContinuousBatchingManager(engine, SamplingParams(max_tokens=2, temperature=0)) as manager,
    ):

        def work(index):
            for n in range(each):
                manager.add_request([65 + n % 20, 66 + index], f"{index}-{n}")
                if n % 5 == 0:
                    manager.cancel_request(f"{index}-{n}")
            for n in range(each // 2):  # half by id, half whatever comes
                got[index].append(manager.get_result(f"{index}-{n}"))
            got[index].extend(manager)

        workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    names = [one.request_id for part in got for one in part if one is not None]
    assert len(names) == len(set(names)) == each * threads
