"""Keeps the results of a comparison.

They are written to the file after every turn, and printed after each workload and at the end.
"""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from ops.benchmarks.compare.report import record, show, show_summary, turn_line
from ops.benchmarks.compare.rounds import Measurement, Turn

Keep = Callable[[dict[str, object]], None]


class Journal:
    """Collects and prints the results of a comparison.

    Args:
        keep: replaces the contents of the JSON file by its argument.
        rounds: number of rounds of each workload.
    """

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
        """Return whether all engines gave the same tokens."""
        return all(found["equal"] for found in self._records)

    def begin(self, measurement: Measurement) -> Callable[[str, Turn], None]:
        """Add a measurement; return the function that `run_rounds` calls after each turn."""
        self._records.append(record(measurement))

        def told(name: str, turn: Turn) -> None:
            self._records[-1] = record(measurement)
            self._keep(
                {**self.results, "complete": False}
            )  # written before printed, so that the file has every printed turn
            self._console.print(
                turn_line(measurement, name, turn, self._rounds), markup=False, soft_wrap=True
            )

        return told

    def show(self) -> None:
        """Print the workloads that were not printed yet, also unfinished ones."""
        for found in self._records[self._shown :]:
            if found["summary"]:
                show(found, self._console)
        self._shown = len(self._records)

    def close(self) -> None:
        self.show()
        found = [result for result in self._records if result["summary"]]
        if found:
            show_summary(found, self._console)
