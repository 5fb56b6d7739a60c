"""`ops/bench engine`: tokens per second and first tokens of the bare engine and its peers.

Peers (Transformers with continuous and with static batching, vLLM) serve the same file
in the same run.
"""

import argparse

from ops.benchmarks.compare import comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    comparison.add_arguments(parser)
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        choices=comparison.PEERS,
        help="repeatable; static: Transformers' generate on padded batches; floor: the linear "
        "layers alone, by MKL, on the same steps; unquantised, wide (weights as float32 in "
        "memory), no-prefix-cache, no-offload: ourselves with other settings",
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    return comparison.compare(arguments, [comparison.OURS, *dict.fromkeys(arguments.peer)])
