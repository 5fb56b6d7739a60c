"""Tests that compute threads get longer slices at the same CPU share, where the kernel shows it."""

import os
import platform
import re
import sys
import threading
from pathlib import Path

import pytest

from tokenmill_worker.engines.own.serve.time_slices import lengthen_slices


def slice_ns(thread: int) -> int | None:
    """Return the thread's scheduler slice in ns, or None if the kernel does not show it."""
    try:
        text = Path(f"/proc/self/task/{thread}/sched").read_text()
    except OSError:
        return None
    found = re.search(r"^se\.slice\s*:\s*(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="Linux's own"
)
def test_a_compute_thread_and_its_children_have_longer_slices_at_the_same_priority() -> None:
    found: dict[str, tuple[int | None, int]] = {}

    def look(who: str) -> None:
        thread = threading.get_native_id()
        found[who] = (slice_ns(thread), os.getpriority(os.PRIO_PROCESS, thread))

    def ask() -> None:
        look("before")
        assert lengthen_slices(20)
        look("after")
        child = threading.Thread(target=look, args=("child",))
        child.start()
        child.join()

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    look("another")
    assert len({nice for _, nice in found.values()}) == 1
    if found["before"][0] is None:
        pytest.skip("this kernel does not tell its threads' slices")
    assert found["after"][0] == found["child"][0] == 20_000_000
    assert found["another"][0] == found["before"][0] != 20_000_000
