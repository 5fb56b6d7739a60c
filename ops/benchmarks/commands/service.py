"""`ops/bench service`: the cost of queue, publishing and recording around the engine.

The whole service (Valkey with its log on disk, a worker, SQLite, a subscriber per job) and the bare
engine serve the same file in the same run. Figures are the share of the bare engine's tokens per
second, the time of a token from its step's end to its subscriber, and the CPU time of each process
around the engine.
"""

import argparse

from ops.benchmarks.compare import comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    comparison.add_arguments(parser)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    return comparison.compare(arguments, [comparison.WHOLE_WAY, comparison.OURS])
