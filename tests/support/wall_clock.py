"""A wall clock of other processes, which a test moves while they run."""

import os
from collections.abc import Mapping
from pathlib import Path

# Imported by Python at its start. The link is read at each call, and leads nowhere: its target is
# the lead of the clock in seconds.
_MOVES_THE_CLOCK = """
import os, time
real, real_ns = time.time, time.time_ns
lead_s = lambda: int(os.readlink({link!r}))
time.time = lambda: real() + lead_s()
time.time_ns = lambda: real_ns() + lead_s() * 10**9
"""


class WallClock:
    """The wall clock of the Python processes that start with `environment`, and of their children.
    `folder` is its own, and is made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.lead_s = 0
        self._folder, self._link = folder, folder / "lead"
        self.jump(0)
        (folder / "sitecustomize.py").write_text(_MOVES_THE_CLOCK.format(link=str(self._link)))

    def environment(self, values: Mapping[str, str]) -> dict[str, str]:
        path = filter(None, (str(self._folder), values.get("PYTHONPATH")))
        return {**values, "PYTHONPATH": os.pathsep.join(path)}

    def jump(self, seconds: int) -> None:
        self.lead_s += seconds
        new = self._folder / "new"
        new.symlink_to(str(self.lead_s))
        new.replace(self._link)

    def now_ns(self, real_ns: int) -> int:
        """Return what the clock shows at a real time."""
        return real_ns + self.lead_s * 1_000_000_000
