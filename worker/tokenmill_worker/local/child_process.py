"""Starts child processes that end when this process ends, even if this process is killed.

`guarded_command(argv)` returns the command line to run. It runs this file in a bare interpreter,
which gives up root if asked, asks Linux for a signal at its parent's death, and becomes the command
by exec: the process id stays the same, with no process in between. A preexec function is not used,
because it can deadlock in processes with threads.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1


def guarded_command(
    argv: Sequence[str], *, at_death: int = signal.SIGTERM, uid: int | None = None
) -> list[str]:
    """Return the command line that runs `argv` as a child that ends with us, as user `uid` if given
    (needs root).
    """
    launcher = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
    return [*launcher, str(os.getpid()), str(int(at_death)), str(-1 if uid is None else uid), *argv]


class GuardedProcess:
    """One running child. Its parent is a thread that waits for it to end. `output` takes what it
    prints; None: it prints to our terminal.

    Linux ties a child's death signal to the *thread* that started it, so the child must not be
    started on a pool's thread that ends before the child does.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        at_death: int = signal.SIGTERM,
        uid: int | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        output: int | IO[bytes] | None = subprocess.DEVNULL,
    ) -> None:
        self._command = guarded_command(argv, at_death=at_death, uid=uid)
        self._cwd = cwd
        self._env = env
        self._output = output
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._hold, name="child", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "set before the constructor returned"
        return self._process

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self, with_signal: int, timeout_s: float = 10.0) -> int:
        """Send the signal, then SIGKILL if the child has not ended in time; returns the exit
        status.
        """
        if self.is_alive:
            self.process.send_signal(with_signal)
            if with_signal != signal.SIGKILL:
                # a stopped child cannot handle the first signal
                self.process.send_signal(signal.SIGCONT)
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._thread.join()
        return status

    def _hold(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=None if self._output is None else subprocess.STDOUT,
                cwd=self._cwd,
                env=self._env,
                # a terminal's Ctrl-C reaches only us: we stop children in order
                start_new_session=True,
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        self._process.wait()


def _main(arguments: list[str]) -> None:
    parent, at_death, uid = (int(value) for value in arguments[:3])
    argv = arguments[3:]
    # before root is given up: the library may be readable by root only
    libc = ctypes.CDLL(None, use_errno=True)
    if uid >= 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    libc.prctl(_PR_SET_PDEATHSIG, at_death, 0, 0, 0)  # after setuid, which would clear it
    if os.getppid() != parent:
        sys.exit(1)  # the parent died before prctl took effect
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    _main(sys.argv[1:])
