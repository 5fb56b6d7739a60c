"""Turns of tenants at compiling: what one of them does, or a thread that cannot start, fails no
grammar of another.
"""

import threading
from concurrent.futures import wait

import pytest

from tests.engines.own.sampling.grammar.test_compiler import Slow, make, regex
from tokenmill_worker.engines.own.sampling import GrammarError


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


def test_a_grammar_wanted_by_two_tenants_is_compiled_in_the_earlier_turn() -> None:
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


def fail_to_start(monkeypatch: pytest.MonkeyPatch, names: set[str], error: Exception) -> None:
    """Let threads of these names not start, while `names` holds them."""
    start = threading.Thread.start

    def start_unless_named(thread: threading.Thread) -> None:
        if thread.name in names:
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_named)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_grammar_whose_thread_cannot_start_fails_and_frees_its_place(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, names = Slow(), {"grammar"}
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


def test_a_compiled_grammar_is_returned_though_the_next_cannot_start(
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
