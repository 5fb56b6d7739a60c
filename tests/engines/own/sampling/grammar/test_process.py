"""Grammars that would hold up or end the engine end a process of their own, and nothing else."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.engines.own.sampling.grammar.test_compiler import VOCAB, regex
from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engines.own.sampling import GrammarCompiler, GrammarError
from tokenmill_worker.engines.own.sampling.grammar.process import CompileLimits

MIB = 2**20
ENDLESS = "a?" * 60_000  # takes minutes, and gigabytes within seconds
LOWEST = -(2**63)
CIRCLES = [
    "root ::= root{2}",
    "root ::= root",
    'root ::= root{1,3} "" ""',
    "root ::= a\na ::= b{0,}\nb ::= root{2}",
]


@pytest.fixture(scope="module")
def usual() -> Iterator[GrammarCompiler]:
    with closing(limited()) as compiler:
        yield compiler


@contextlib.contextmanager
def closing(compiler: GrammarCompiler) -> Iterator[GrammarCompiler]:
    try:
        yield compiler
    finally:
        compiler.close()


def limited(**limits: Any) -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [256], limits=CompileLimits(**limits))


def problem(future: Future[Any]) -> GrammarError:
    error = future.exception(120)
    assert isinstance(error, GrammarError), error
    assert "\n" not in str(error)
    return error


def is_compiled(compiler: GrammarCompiler, source: str, tenant: str = "victim") -> bool:
    return bool(compiler.compile(regex(source), tenant).result(120)().accept_token(ord("1")))


def pid_of(compiler: GrammarCompiler) -> int:
    assert compiler._process is not None
    assert compiler._process.pid is not None
    return compiler._process.pid


def workers(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def status_kib(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_grammar_that_fills_memory_ends_alone_within_its_limit() -> None:
    with closing(limited(memory_bytes=256 * MIB)) as compiler:
        assert is_compiled(compiler, "1")
        pid, ours = pid_of(compiler), status_kib(os.getpid(), "VmRSS")
        before = max(status_kib(worker, "VmSize") for worker in workers(pid))
        future, most, count = compiler.compile(regex(ENDLESS), "mallory"), 0, 0
        while not future.done():
            most = max(most, *(status_kib(worker, "VmSize") for worker in workers(pid)), 0)
            if count < 3:
                count += 1
                assert is_compiled(compiler, f"1{{{count}}}")
        error = problem(future)
        assert str(error) == "the grammar took more than 0.25 GiB of memory to compile"
        assert error.code == "invalid_request"
        assert before + 64 * 1024 < most <= before + 256 * 1024
        assert status_kib(os.getpid(), "VmRSS") < ours + 64 * 1024
        assert is_compiled(compiler, "12")
        assert pid_of(compiler) == pid


def test_an_endless_grammar_is_refused_after_its_cpu_time() -> None:
    with closing(limited(cpu_s=0.3, wall_s=600)) as compiler:
        error = problem(compiler.compile(regex(ENDLESS)))
        assert str(error) == "the grammar took more than 0.3 s to compile"
        assert error.code == "invalid_request"


def test_a_grammar_cut_off_by_wall_time_is_an_engine_error_to_try_again() -> None:
    with closing(limited(cpu_s=600, wall_s=0.3)) as compiler:
        error = problem(compiler.compile(regex(ENDLESS)))
        assert "too busy to compile the grammar within 0.3 s; try again later" in str(error)
        assert error.code == "engine_error"


def test_endless_grammars_of_two_tenants_do_not_block_a_third() -> None:
    with closing(limited(cpu_s=0.3)) as compiler:
        futures = [
            compiler.compile(regex(ENDLESS + "b" * i), tenant)
            for i in range(5)
            for tenant in ("mallory", "eve")
        ]
        for i in range(1, 4):
            assert is_compiled(compiler, f"1{{{i}}}")
        assert {str(problem(future)) for future in futures} == {
            "the grammar took more than 0.3 s to compile"
        }
        assert all(is_compiled(compiler, "12", tenant) for tenant in ("mallory", "eve"))
        until(lambda: len(workers(pid_of(compiler))) == compiler.limits.threads)


@pytest.mark.parametrize("source", CIRCLES)
def test_circular_grammar_rules_are_refused(usual: GrammarCompiler, source: str) -> None:
    form = {"type": "grammar", "grammar": source}
    tag: dict[str, object] = {"type": "structural_tag", "format": form}
    for wanted in (ResponseFormat(grammar=source), ResponseFormat(structural_tag=tag)):
        error = problem(usual.compile(wanted))
        assert error.code == "invalid_request"
        assert "stand for themselves" in str(error) or "it admits no text" in str(error)


def test_a_crash_of_the_library_fails_only_its_grammar(usual: GrammarCompiler) -> None:
    assert is_compiled(usual, "123")
    pid = pid_of(usual)
    long = usual.compile(regex("1" + "|".join(f"w{i}" for i in range(3_000))), "victim")
    error = problem(usual.compile(ResponseFormat(grammar="root ::= root{2}"), "mallory"))
    assert "stand for themselves" in str(error)
    assert long.result(120)
    assert is_compiled(usual, "1234")
    assert pid_of(usual) == pid


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [LOWEST + 1, 1]},
        {"type": "integer", "enum": [LOWEST - 5, 1]},
        {"type": "object", "properties": {"a": {"const": LOWEST}}},
    ],
)
def test_the_lowest_integers_are_refused_or_left_open(
    usual: GrammarCompiler, schema: dict[str, object]
) -> None:
    error = problem(usual.compile(ResponseFormat(json_schema=schema)))
    assert "near -2^63, which is not supported" in str(error)
    assert usual.compile(ResponseFormat(json_schema=schema, strict=False)).result(120)()


def test_a_killed_compiler_process_is_replaced(usual: GrammarCompiler) -> None:
    assert is_compiled(usual, "1")
    pid = pid_of(usual)
    killed = workers(pid)
    for worker in killed:
        os.kill(worker, signal.SIGKILL)
    until(lambda: not set(killed) & set(workers(pid)))
    assert is_compiled(usual, "1a")
    assert pid_of(usual) == pid
    old = workers(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(is_alive, (pid, *old))))
    assert is_compiled(usual, "1b")
    assert pid_of(usual) != pid


def test_a_grammar_whose_process_is_killed_is_an_engine_error_to_try_again(
    usual: GrammarCompiler,
) -> None:
    assert is_compiled(usual, "1")
    future = usual.compile(regex(ENDLESS))
    until(lambda: any(map(is_running, workers(pid_of(usual)))))
    (busy,) = filter(is_running, workers(pid_of(usual)))
    os.kill(busy, signal.SIGKILL)
    error = problem(future)
    assert "was ended; try again later" in str(error)
    assert error.code == "engine_error"
    until(lambda: len(workers(pid_of(usual))) == usual.limits.threads)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tR" in Path(f"/proc/{pid}/status").read_text()
    return False


def test_the_compiler_process_inherits_no_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, closing(limited()) as compiler:
        server.set_inheritable(True)
        assert is_compiled(compiler, "1")
        listens = str(Path(f"/proc/self/fd/{server.fileno()}").readlink())
        pid = pid_of(compiler)
        until(lambda: bool(workers(pid)))
        for one in (pid, *workers(pid)):
            held = [str(each.readlink()) for each in Path(f"/proc/{one}/fd").iterdir()]
            assert listens not in held
            if one != pid:
                assert sum(each.startswith("socket:") for each in held) == 1


def test_a_closed_compiler_leaves_no_process_and_starts_none() -> None:
    compiler = limited()
    assert is_compiled(compiler, "1")
    busy = compiler.compile(regex(ENDLESS))
    pid = pid_of(compiler)
    until(lambda: any(map(is_running, workers(pid))))
    all_of_it = [pid, *workers(pid)]
    compiler.close()
    until(lambda: not any(map(is_alive, all_of_it)))
    assert problem(busy).code == "engine_error"
    assert problem(compiler.compile(regex("12"))).code == "engine_error"
    assert compiler._process is not None
    assert compiler._process.pid is None


def test_a_compiler_that_is_closed_while_it_starts_leaves_no_process() -> None:
    compiler = limited()
    compiler.start()
    assert compiler._process is not None
    process = compiler._process
    until(lambda: process.pid is not None)
    pid = pid_of(compiler)
    compiler.close()
    until(lambda: not is_alive(pid))
    assert process.pid is None


ENGINE = """
import sys, time
from tests.engines.own.sampling.grammar.test_process import ENDLESS, limited, pid_of, regex
compiler = limited(cpu_s=600, wall_s=600)
compiler.compile(regex("1")).result(120)
compiler.compile(regex(ENDLESS))
print(pid_of(compiler), flush=True)
time.sleep(600)
"""


def test_a_killed_engine_leaves_no_compiler_process() -> None:
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        until(lambda: any(map(is_running, workers(pid))))
        all_of_it = [pid, *workers(pid)]
        engine.kill()
    until(lambda: not any(map(is_alive, all_of_it)))
