"""`tokenmill top` fits its screen, says first what is wrong, and outlives the server that it looks
at.
"""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console

from tests.support.valkey import ControlledValkey
from tokenmill.cli.views.top import Look, draw
from tokenmill.cli.views.top_queues import draw_all, trouble
from tokenmill.operations.overview import ClassState, QueueState, TenantState
from tokenmill.operations.records import JobInfo
from tokenmill_schemas import JobStatus
from tokenmill_schemas.control import WorkerStatus

NOW_MS = 1_795_000_000_000
EMPTY = QueueState(
    queue="chat", classes={name: ClassState() for name in ("interactive", "standard", "bulk")},
    running=0, scheduled=0,
    unrecorded=0, dead=0, submitted=0, finished={}, entries_dropped=0, tenants=[], workers=[],
)  # fmt: skip
WORKER = WorkerStatus(
    worker_id="a-node-with-a-long-name-12345", model="m", started_ms=NOW_MS - 3_700_000, running=58,
    waiting=3,
    max_running=64, total_blocks=4096, free_blocks=1024, tokens_per_s=1834.2, prefix_hits=0.42,
    first_token_ms=(131.0, 420.0), token_ms=(18.0, 31.0), queue_ms=(12.0, 80.0), to_record=4,
)  # fmt: skip
BUSY = msgspec.structs.replace(
    EMPTY, classes={"interactive": ClassState(waiting=12, waiting_tokens=4_800, oldest_ms=16_000),
                    "bulk": ClassState(waiting=1_234_567, waiting_tokens=2_345_000_000,
                        oldest_ms=7_200_000)},
    running=120, scheduled=7, dead=2, submitted=9_000_000, finished={"succeeded": 8_000_000},
        workers=[WORKER],
    tenants=[TenantState(tenant="acme", waiting=9, running=60, tokens_per_s=1200.0),
        TenantState(tenant="", running=1)],
)  # fmt: skip
JOB = JobInfo(
    job_id="0193a1b2-7c3d-7e4f-8a5b-000000000001",
    status=JobStatus.RUNNING,
    priority="interactive",
    tokens=17,
)


def shown(queue: QueueState, width: int, last: bool = False, **changes: object) -> str:
    look = Look(now_ms=NOW_MS, clock="12:00:00", queue=queue, **changes)  # type: ignore[arg-type]
    console = Console(width=width, force_terminal=False, soft_wrap=False)
    with console.capture() as captured:
        console.print(trouble("refused", "12:00:05", [look], width) if last else draw(look, width))
    return captured.get()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_view_fits_the_width_and_shows_numbers_whole(width: int) -> None:
    text = shown(BUSY, width, jobs=[JOB], submitted_per_s=812.3, finished_per_s=9.5)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for words in (
        "58/64 +3",
        "75%",
        "1,834",
        "131 ms",
        "18 ms",
        "42%",
        "1,234,567",
        "2.3 G",
        "16 s",
        "812 in/s",
        "9.5 out/s",
    ):
        assert words in text, words
    assert "12345" in text  # the end of the worker's name tells it apart
    assert JOB.job_id in text
    assert ("420 ms" in text) == (width >= 120)


def test_headings_name_their_counts_and_a_legend_explains_abbreviations() -> None:
    text = shown(BUSY, 80, submitted_per_s=812.3, finished_per_s=9.5)
    assert re.search(
        r"1,834 tokens/s +jobs: +120 running +1,234,579 waiting +812 in/s +9.5 out/s", text
    )
    legend = "+n waits · TTFT to first token · ITL between tokens · HITS cache hits"
    assert text.splitlines()[-1].rstrip() == legend


@pytest.mark.parametrize("width", [80, 140])
def test_a_live_view_names_the_key_that_ends_it(width: int) -> None:
    look, console = Look(now_ms=NOW_MS, clock="12:00:00", queue=BUSY), Console(width=width)
    views = [draw_all([look] * n, width, is_live=True) for n in (1, 2)]
    for view in (*views, trouble("refused", "12:00:05", [look], width), trouble("no", "", [], 80)):
        with console.capture() as captured:
            console.print(view)
        assert captured.get().rstrip().endswith("q quits")


def test_the_tables_show_the_use_of_each_tenant() -> None:
    text = shown(BUSY, 100)
    assert re.search(r"acme +60 +9 +1,200 ━+", text)
    assert re.search(r"\(none\) +1 +0 +0 ", text)
    assert "2 DEAD" in text
    assert "acme" not in shown(
        msgspec.structs.replace(BUSY, tenants=[TenantState(tenant="", running=9)]), 100
    )


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_long_tenant_name_leaves_the_numbers_whole(width: int) -> None:
    name = "acme-corporation-with-a-very-long-tenant-name"
    tenant = TenantState(tenant=name, waiting=9, running=60, tokens_per_s=1200.0)
    job = msgspec.structs.replace(JOB, tenant=name, created_ms=NOW_MS - 9_500, worker_id="vm-1")
    text = shown(msgspec.structs.replace(BUSY, tenants=[tenant]), width, jobs=[job])
    assert re.search(r"TENANT +RUNNING +WAITING +TOK/S", text)
    assert re.search(r"acme-\S+… +60 +9 +1,200 +━+", text)
    assert re.search(rf"{JOB.job_id} +running +interactive +17 +9\.50 s", text)
    assert text.count("\n") == shown(BUSY, width, jobs=[JOB]).count("\n") - 1  # one tenant less


def test_a_queue_without_workers_shows_this_problem_first() -> None:
    idle, stuck = shown(EMPTY, 80), shown(msgspec.structs.replace(BUSY, workers=[]), 80)
    assert "NO WORKER IS ALIVE  nothing is waiting either" in idle.splitlines()[0]
    assert "NO WORKER IS ALIVE  and jobs are waiting" in stuck.splitlines()[0]
    assert "tokenmill worker" in stuck


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draining": True}, "draining, claims nothing more"),
        ({"model": ""}, "loading its model"),
        ({"problems": ("SQL: connection refused",)}, "SQL: connection refused"),
        ({"engine_restarts": 2}, "2 engine restarts since it started"),
    ],
)
def test_the_problem_of_a_worker_is_shown_in_words(changes: dict[str, object], words: str) -> None:
    troubled = msgspec.structs.replace(WORKER, **changes)
    assert words in shown(msgspec.structs.replace(EMPTY, workers=[troubled]), 80)
    assert words not in shown(msgspec.structs.replace(EMPTY, workers=[WORKER]), 80)


@pytest.mark.parametrize("width", [80, 140])
def test_several_queues_are_shown_as_one_line_each_before_their_workers(width: int) -> None:
    queues = [BUSY, msgspec.structs.replace(EMPTY, queue="embeddings-with-a-long-name")]
    looks = [Look(now_ms=NOW_MS, clock="12:00:00", queue=queue) for queue in queues]
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(draw_all(looks, width))
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"chat +1 +120 +12 +0 +1,234,567 +", text)
    assert re.search(r"embeddings\S* +0 +0 +0 +0 +0 +– +0 +0", text)
    assert "58/64 +3" in text
    assert "NO WORKER IS ALIVE" in text
    assert text.index("QUEUE") < text.index("58/64") < text.index("NO WORKER")


@pytest.mark.parametrize("width", [80, 140])
def test_workers_of_one_model_share_a_line_of_its_length_and_names(width: int) -> None:
    names = {"max_model_len": 8_192, "adapters": ("poems",), "aliases": {"chat": "m"}}
    known = msgspec.structs.replace(WORKER, **names)
    lines = shown(
        msgspec.structs.replace(EMPTY, workers=[known, known, WORKER]), width
    ).splitlines()
    served = [line.strip() for line in lines if line.startswith("m")]
    assert served == ["m · 8,192 tokens · adapters poems · also chat", "m"]


def test_a_worker_that_loads_has_no_problem() -> None:
    loading = msgspec.structs.replace(WORKER, model="", problems=("the engine is not ready",))
    assert "TROUBLE" not in shown(msgspec.structs.replace(EMPTY, workers=[loading]), 80)
    broken = msgspec.structs.replace(WORKER, problems=("SQL: connection refused",))
    assert (
        "TROUBLE"
        in shown(msgspec.structs.replace(EMPTY, workers=[loading, broken]), 80).splitlines()[0]
    )


def test_the_last_view_stays_marked_as_old_while_the_server_is_unreachable() -> None:
    text = shown(BUSY, 80, last=True)
    assert (
        text.index("NO CONNECTION")
        < text.index("refused")
        < text.index("as it was at 12:00:00")
        < text.index("58/64")
    )


@pytest.mark.redis
def test_q_quits_and_restores_the_terminal(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [
        sys.executable,
        "-m",
        "tokenmill.cli",
        "top",
        "--redis-url",
        make_valkey().url,
        "--interval",
        "60",
    ]
    environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    screen = b""
    try:
        while b"NO WORKER IS ALIVE" not in screen:
            assert select.select([ours], [], [], 60)[0]
            screen += os.read(ours, 65_536)
        os.write(ours, b"xq")
        assert process.wait(30) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.redis
def test_the_live_view_continues_after_its_server_restarts(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    server = make_valkey()
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "tokenmill.cli",
        "top",
        "--redis-url",
        server.url,
        "--queue",
        "chat",
        "--interval",
        "0.1",
    ]
    environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    screen = ""

    def until(words: str) -> None:
        nonlocal screen
        deadline = time.monotonic() + 60
        while words not in screen:
            assert time.monotonic() < deadline, f"{words} never came: {screen[-2000:]}"
            if select.select([ours], [], [], 0.5)[0]:
                screen += os.read(ours, 65_536).decode(errors="replace")
        screen = screen[screen.index(words) + len(words) :]

    try:
        until("NO WORKER IS ALIVE")
        server.stop()
        until("NO CONNECTION")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
