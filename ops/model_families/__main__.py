"""`ops/families`: how the engine serves each causal family of the installed Transformers."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ops.model_families import small, table, trial
from ops.model_families.trial import Trial

GUIDE = Path(__file__).parents[1] / "guides" / "models.md"


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a family crashes or gives other tokens than `generate`, else 0."""
    parser = argparse.ArgumentParser(prog="ops/families", description=__doc__)
    parser.add_argument(
        "families", nargs="*", help="model types, e.g. llama gemma2; none: all of them"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="families tried at the same time (default 1)"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=trial.TIME_LIMIT_S,
        help="seconds for each (default 120)",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table of ops/guides/models.md"
    )
    parser.add_argument("--device", default="cpu", help="of the engine; generate runs on the CPU")
    parser.add_argument("--no-fuse", action="store_true", help="run on Transformers' own modules")
    options = parser.parse_args(arguments)
    if options.write and options.families:
        parser.error("--write needs a run of all families")
    results = []
    engine = {"fuse": not options.no_fuse, "device": options.device}
    for result in run_all(
        options.families or small.families(), options.jobs, options.time_limit, **engine
    ):
        results.append(result)
        print(
            f"{result.outcome:9}  {result.name}{': ' if result.reason else ''}{result.reason}",
            flush=True,
        )
    counts = Counter(result.outcome for result in results)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    if options.write:
        GUIDE.write_text(table.replaced(GUIDE.read_text(), table.rendered(results)))
    return 1 if counts["wrong"] + counts["crashed"] else 0


def run_all(families: list[str], jobs: int, time_limit_s: float, **engine: Any) -> Iterator[Trial]:
    """Yield results in the order of the families, each with the settings that built it.

    `engine` has the settings that differ from the engine's defaults.
    """
    trials = [(family, setting) for family in families for setting in small.settings_of(family)]

    def tried(one: tuple[str, str]) -> Trial:
        return trial.run(*one, time_limit_s, **engine)

    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(tried, trials):
            if not (found.setting and found.outcome == "not built"):
                yield found


if __name__ == "__main__":
    sys.exit(main())
