"""A pause of the manager runs no step, and ends well however the manager or the caller does."""

import signal
import threading
import time

import pytest

from tests.engines.own.direct.conftest import GREEDY, LONG, load
from tokenmill_worker.engines.own import ContinuousBatchingManager
from tokenmill_worker.engines.own.errors import EngineError


def test_a_pause_runs_no_step_keeps_requests_and_drops_cached_prefixes(engine, manager):
    prompt = list(range(65, 105))
    manager.add_request(prompt, "first")
    manager.get_result("first")
    manager.add_request(prompt, "hit")
    assert manager.get_result("hit").num_cached_tokens > 0
    manager.add_request([65, 66], "running", max_new_tokens=LONG)
    with manager.pause(), manager.pause():
        steps = engine.stats().steps
        manager.add_request(prompt, "after")
        with pytest.raises(EngineError, match="paused"):
            manager.stop()
        time.sleep(0.05)
        assert engine.stats().steps == steps
    assert manager.get_result("after").num_cached_tokens == 0
    assert len(manager.get_result("running").generated_tokens) == LONG


@pytest.fixture
def slow_manager():
    with (
        load(model="synthetic?step_ms=400") as engine,
        ContinuousBatchingManager(engine, GREEDY) as manager,
    ):
        manager.add_request([65, 66], "running")
        while not engine.stats().steps:
            time.sleep(0.01)
        yield manager


def test_an_interrupted_wait_for_a_pause_leaves_the_manager_running(slow_manager):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt), slow_manager.pause():
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(slow_manager.get_result("running").generated_tokens) == 6
    slow_manager.stop()


def test_stop_from_another_thread_waits_for_the_end_of_a_pause(manager):
    with manager.pause():
        stopper = threading.Thread(target=manager.stop)
        stopper.start()
        stopper.join(0.2)
        assert stopper.is_alive()
        assert manager.is_running()
    stopper.join(20)
    assert not manager.is_running()


def test_pausing_a_manager_that_is_not_running_raises(engine):
    manager = ContinuousBatchingManager(engine, GREEDY)
    for prepare in (lambda: None, lambda: (manager.start(), manager.stop())):
        prepare()
        with pytest.raises(EngineError, match="does not run"), manager.pause():
            pass


def test_waiting_for_a_pause_raises_if_the_loop_dies(slow_manager):
    slow_manager._engine.settle = None  # the end of the step under way raises TypeError
    with pytest.raises(EngineError, match="loop has failed"), slow_manager.pause():
        pass
    del slow_manager._engine.settle


def test_a_pause_held_by_several_threads_lasts_until_the_last_leaves(engine, manager):
    manager.add_request([65, 66], "running", max_new_tokens=LONG)
    may_leave = [threading.Event() for _ in range(3)]
    inside = threading.Barrier(4)

    def hold(leave):
        with manager.pause():
            inside.wait(20)
            leave.wait(20)

    holders = [threading.Thread(target=hold, args=(leave,)) for leave in may_leave]
    for holder in holders:
        holder.start()
    inside.wait(20)
    steps = engine.stats().steps
    for leave, holder in zip(may_leave, holders, strict=True):
        time.sleep(0.05)
        assert engine.stats().steps == steps
        leave.set()
        holder.join(20)
    assert len(manager.get_result("running").generated_tokens) == LONG
