"""Waits for a machine that does nothing else."""

import psutil

QUIET_PERCENT, QUIET_LOOK_S, QUIET_LIMIT_S = 3.0, 0.25, 5.0


def wait_until_quiet() -> None:
    """Wait until the cores are nearly idle, for QUIET_LIMIT_S at most.

    Work that an engine does after its turn must not count in the next engine's turn.
    """
    for _ in range(round(QUIET_LIMIT_S / QUIET_LOOK_S)):
        if psutil.cpu_percent(QUIET_LOOK_S) <= QUIET_PERCENT:
            return
