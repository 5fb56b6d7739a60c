"""Where a test process stood when it was ended from within.

execnet calls `os._exit` when its pipe has broken, pytest-timeout when a signal will not do, and neither has anywhere to
say so, since what a test process writes is captured.
"""

import contextlib
import faulthandler
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def last_words(worker: Mapping[str, object]) -> Path:
    """Of the test process that was given this (`workerinput`)."""
    return Path(tempfile.gettempdir()) / f"tokenmill-tests-{worker['testrunuid']}-{worker['workerid']}"


def leave_last_words(path: Path) -> None:
    """From now on `os._exit` in this process, not in those forked from it, writes the stacks of all threads there."""
    process, leave = os.getpid(), os._exit

    def leave_with_words(status: int) -> None:
        if os.getpid() == process:
            with contextlib.suppress(OSError), path.open("w") as file:
                print(f"os._exit({status})", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        leave(status)

    os._exit = leave_with_words  # type: ignore[assignment]
