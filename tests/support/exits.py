"""Writes the stacks of a test process that was ended from within.

execnet calls `os._exit` when its pipe has broken, and pytest-timeout when a signal does not help.
Neither can report it, since the output of a test process is captured.
"""

import contextlib
import faulthandler
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def last_words(worker: Mapping[str, object]) -> Path:
    """Return the file for the stacks of the test process that got this `workerinput`."""
    return (
        Path(tempfile.gettempdir()) / f"tokenmill-tests-{worker['testrunuid']}-{worker['workerid']}"
    )


def leave_last_words(path: Path) -> None:
    """Make `os._exit` write the stacks of all threads to `path` first.

    Processes forked from this one are not affected.
    """
    process, leave = os.getpid(), os._exit

    def leave_with_words(status: int) -> None:
        if os.getpid() == process:
            with contextlib.suppress(OSError), path.open("w") as file:
                print(f"os._exit({status})", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        leave(status)

    os._exit = leave_with_words  # type: ignore[assignment]
