"""A pytest plugin: writes failures and slow tests as they happen, and lines for the table.

A run that is killed has thus printed why it failed or took long.
"""

from typing import Any

import pytest

SLOW_S = 5.0


class Reports:
    """Writes failures and counts the outcomes."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("/")[2]
        if report.duration >= SLOW_S:
            self._terminal.write_line(f"\n{report.when} took {report.duration:.0f} s: {name}")
        if report.failed:
            reason = getattr(report.longrepr, "reprcrash", None) or report.longreprtext or "?"
            said = str(getattr(reason, "message", reason)).splitlines()[0]
            self._terminal.write_line(f"\n| {report.when} failed: {name}: {said}")
            self._terminal.write_line(report.longreprtext)

    def pytest_terminal_summary(self) -> None:
        kinds = ("passed", "failed", "error", "skipped")
        counts = [f"{len(self._terminal.stats.get(kind, []))} {kind}" for kind in kinds]
        self._terminal.write_line(f"\n| {', '.join(counts)}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):  # not in a worker of xdist
        config.pluginmanager.register(Reports(terminal), "gpu-check-reports")
