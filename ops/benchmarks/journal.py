"""What a comparison has measured so far: kept in the file after every turn, shown when a workload or the run ends."""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from ops.benchmarks.report import record, show, show_summary, turn_line
from ops.benchmarks.rounds import Measurement, Turn

Keep = Callable[[dict[str, object]], None]


class Journal:
    """`keep` replaces the file's contents by what it is given; `rounds` are how many each workload is to have."""

    def __init__(self, console: Console, keep: Keep, rounds: int) -> None:
        self._console, self._keep, self._rounds = console, keep, rounds
        self._records: list[dict[str, Any]] = []
        self._shown = 0
        self.engines: dict[str, str] = {}

    @property
    def results(self) -> dict[str, object]:
        return {"results": self._records, "engines": self.engines}

    @property
    def is_equal(self) -> bool:
        """Did all engines give the same tokens?"""
        return all(found["equal"] for found in self._records)

    def begin(self, measurement: Measurement) -> Callable[[str, Turn], None]:
        """What `run_rounds` tells of its turns."""
        self._records.append(record(measurement))

        def told(name: str, turn: Turn) -> None:
            self._records[-1] = record(measurement)
            self._keep({**self.results, "complete": False})  # what is told is kept
            self._console.print(turn_line(measurement, name, turn, self._rounds), markup=False, soft_wrap=True)

        return told

    def show(self) -> None:
        """The workloads that were not shown yet, as far as they got."""
        for found in self._records[self._shown :]:
            if found["summary"]:
                show(found, self._console)
        self._shown = len(self._records)

    def close(self) -> None:
        self.show()
        found = [result for result in self._records if result["summary"]]
        if found:
            show_summary(found, self._console)
