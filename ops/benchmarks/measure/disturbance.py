"""Measures what else used the cores during a round: other processes, and the machine's host."""

import contextlib

import psutil

QUIET_PERCENT, QUIET_LOOK_S, QUIET_LIMIT_S = 3.0, 0.25, 5.0


def wait_until_quiet() -> None:
    """Wait until the cores are nearly idle, for QUIET_LIMIT_S at most.

    Work that an engine does after its turn must not count in the next engine's turn.
    """
    for _ in range(round(QUIET_LIMIT_S / QUIET_LOOK_S)):
        if psutil.cpu_percent(QUIET_LOOK_S) <= QUIET_PERCENT:
            return


class CoreWatch:
    """Measures the share of all cores' time that others used since its construction.

    `pid` is the root of the process tree that is being measured.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._before = self._read()

    def others_share(self) -> float:
        total, others = (
            now - before for now, before in zip(self._read(), self._before, strict=True)
        )
        return max(0.0, others / total) if total else 0.0

    def _read(self) -> tuple[float, float]:
        """Return the seconds of all cores so far, and those that others used.

        Others are processes outside the tree, and the host while it runs other machines. The
        tree's time is that of its living processes and of their ended children.
        """
        times = psutil.cpu_times()
        total = sum(times[:8])  # from the ninth on, times are counted again
        used = total - times.idle - times.iowait
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    used -= sum(process.cpu_times()[:4])
        return total, used
