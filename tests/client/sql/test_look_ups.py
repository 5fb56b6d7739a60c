"""The threads of look-ups end when they have nothing to do; a closed client and a fork do not wait
for them.
"""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from tokenmill.errors import ClientClosed
from tokenmill.sql.look_ups import LookUps
from tokenmill_schemas.result import JobResult, JobStatus


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tokenmill-sql"]


def result_of(job_id: str) -> JobResult:
    return JobResult(job_id=job_id, status=JobStatus.SUCCEEDED)


def test_unclosed_look_ups_leave_no_thread_and_are_freed() -> None:
    look_ups = LookUps(result_of)
    for number in range(8):
        assert look_ups.find(f"job-{number}") == result_of(f"job-{number}")
    for thread in threads():
        thread.join(60)
    held = weakref.ref(look_ups)
    del look_ups
    gc.collect()
    assert held() is None


def test_look_ups_beyond_the_pool_s_connections_wait_for_a_thread() -> None:
    for thread in threads():
        thread.join(60)
    release, started = threading.Event(), threading.Semaphore(0)

    def wait(job_id: str) -> JobResult:
        started.release()
        release.wait(60)
        return result_of(job_id)

    look_ups = LookUps(wait)
    asked = [look_ups._ask(f"job-{number}") for number in range(8)]
    assert all(started.acquire(timeout=60) for _ in range(5))
    assert len(threads()) == 5
    release.set()
    assert [one.result(60) for one in asked] == [result_of(f"job-{number}") for number in range(8)]


def test_a_look_up_after_close_raises_client_closed() -> None:
    look_ups = LookUps(result_of)
    look_ups.find("job")
    look_ups.close()
    with pytest.raises(ClientClosed):
        look_ups.find("job")


FORK = """
import os, time
from tokenmill.sql import look_ups
look_ups.LIMIT_S = 5.0

def look_up(job_id):
    if job_id.isdigit():
        time.sleep(60)

asks = look_ups.LookUps(look_up)
for number in range(5):  # every thread is busy at the fork
    asks._ask(str(number))
child = os.fork()
if not child:
    asks.find("child")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_looks_up_although_the_threads_stayed_behind() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")
