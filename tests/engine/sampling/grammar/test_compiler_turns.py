"""Turns of tenants at compiling: what one of them does, or a thread that cannot start, fails no
grammar of another.
"""

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.sampling.grammar.test_compiler import Slow, make, regex
from tokenmill_worker.engine.sampling import GrammarCompiler, GrammarError


def test_slow_grammars_of_one_tenant_leave_a_thread_to_the_others() -> None:
    slow = Slow()
    compiler = make(slow)
    futures = [compiler.compile(regex(f"slow {i}"), "mallory") for i in range(10)]
    for i in range(5):
        assert compiler.compile(regex(f"quick {i}"), "victim").result(60) == f"regex:quick {i}"
    assert sorted(slow.calls)[:5] == [f"quick {i}" for i in range(5)]
    assert len(slow.calls) == 7
    assert not any(future.done() for future in futures)
    for i in range(10):
        slow.gate(f"slow {i}").set()
    assert not wait(futures, 60).not_done


def test_a_grammar_that_waits_for_another_tenant_is_compiled_in_the_first_turn() -> None:
    slow = Slow()
    compiler = make(slow, threads=2, threads_each=1)
    first = compiler.compile(regex("slow"), "mallory")
    shared = compiler.compile(regex("shared"), "mallory")
    assert compiler.compile(regex("shared"), "victim").result(60) == "regex:shared"
    assert shared.result(60) == "regex:shared"
    slow.gate("slow").set()
    assert first.result(60) == "regex:slow"
    assert compiler.compile(regex("last"), "mallory").result(60) == "regex:last"
    assert set(slow.calls[:2]) == {"slow", "shared"}  # beside each other
    assert slow.calls[2:] == ["last"]


def test_threads_that_one_tenant_keeps_busy_stop_its_own_grammars_alone() -> None:
    slow = Slow()
    compiler = make(slow, wall_s=0.1, stuck=3, stuck_each=1)
    with pytest.raises(GrammarError, match="too busy"):
        compiler.compile(regex("slow"), "mallory").result(60)
    with pytest.raises(GrammarError, match="too many grammars"):
        compiler.compile(regex("quick"), "mallory").result(60)
    assert compiler.compile(regex("quick"), "victim").result(60) == "regex:quick"
    slow.gate("slow").set()


def make_stuck(compiler: GrammarCompiler, tenant: str, source: str) -> None:
    with pytest.raises(GrammarError, match="too busy"):
        compiler.compile(regex(source), tenant).result(60)


def test_a_refused_tenant_does_not_join_a_grammar_that_waits_for_another() -> None:
    slow = Slow()
    compiler = make(slow, wall_s=0.1, threads_each=1, stuck_each=1)
    make_stuck(compiler, "mallory", "slow 0")
    compiler.limits = replace(compiler.limits, wall_s=60)
    first = compiler.compile(regex("slow 1"), "victim")
    waits = compiler.compile(regex("shared"), "victim")
    with pytest.raises(GrammarError, match="too many grammars"):
        compiler.compile(regex("shared"), "mallory").result(0)
    slow.gate("slow 1").set()
    assert first.result(60) == "regex:slow 1"
    assert waits.result(60) == "regex:shared"
    slow.gate("slow 0").set()


def share_behind_stuck(slow: Slow, **options: object) -> list[Future[Any]]:
    """Let one tenant's thread get stuck while a grammar of its own, and one that another tenant
    waits for too, wait behind it; return the futures of those two.
    """
    compiler = make(slow, threads=1, **options)
    for source in ("slow 0", "slow 1"):
        compiler.compile(regex(source), "mallory")
    own, shared = (compiler.compile(regex(source), "mallory") for source in ("own", "shared"))
    assert compiler.compile(regex("shared"), "victim") is shared
    limits = compiler.limits
    compiler.limits = replace(limits, wall_s=0.5)
    slow.gate("slow 0").set()
    deadline = time.monotonic() + 60
    while "slow 1" not in slow.calls:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    compiler.limits = limits  # of what starts behind it
    return [own, shared]


def test_a_grammar_that_another_tenant_waits_for_outlives_the_refusal_of_one() -> None:
    slow = Slow()
    own, shared = share_behind_stuck(slow, stuck_each=1)
    assert "too many grammars" in str(own.exception(60))
    assert shared.result(60) == "regex:shared"
    slow.gate("slow 1").set()


def test_all_that_waits_is_refused_once_too_many_threads_are_stuck() -> None:
    slow = Slow()
    futures = share_behind_stuck(slow, stuck=1)
    assert all("too many grammars" in str(future.exception(60)) for future in futures)
    slow.gate("slow 1").set()


def fail_to_start(monkeypatch: pytest.MonkeyPatch, names: set[str], error: Exception) -> None:
    """Let threads of these names not start, while `names` holds them."""
    start = threading.Thread.start

    def start_unless_named(thread: threading.Thread) -> None:
        if thread.name in names:
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_named)


@pytest.mark.parametrize("name", ["grammar", "grammar limit"])
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_grammar_whose_thread_cannot_start_fails_and_leaves_its_place(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, names = Slow(), {name}
    compiler = make(slow, threads=1)
    fail_to_start(monkeypatch, names, error)
    for _ in range(3):
        problem = compiler.compile(regex("a")).exception(60)
        assert isinstance(problem, GrammarError)
        assert "no thread left to compile the grammar; try again later" in str(problem)
        assert problem.code == "engine_error"
    names.clear()
    assert compiler.compile(regex("a")).result(60) == "regex:a"
    assert slow.calls == ["a"]


def test_a_compiled_grammar_is_given_out_where_the_next_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, names = Slow(), set[str]()
    compiler = make(slow, threads=1)
    first = compiler.compile(regex("slow"))
    waits = [compiler.compile(regex(source)) for source in "ab"]
    names.add("grammar")
    fail_to_start(monkeypatch, names, RuntimeError("can't start new thread"))
    slow.gate("slow").set()
    assert first.result(60) == "regex:slow"
    assert all("no thread left" in str(future.exception(60)) for future in waits)
    names.clear()
    assert compiler.compile(regex("a")).result(60) == "regex:a"


def test_tenants_without_stuck_threads_are_not_remembered() -> None:
    slow = Slow()
    compiler = make(slow)
    for i in range(20):
        assert compiler.compile(regex(f"quick {i}"), f"tenant {i}").result(60)
    compiler.limits = replace(compiler.limits, wall_s=0.1)
    make_stuck(compiler, "mallory", "slow")
    assert dict(compiler._stuck) == {"mallory": 1}
    slow.gate("slow").set()
    deadline = time.monotonic() + 60
    while compiler._stuck:
        assert time.monotonic() < deadline
        time.sleep(0.01)
