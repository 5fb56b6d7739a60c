"""`ops/bench engine`: tokens per second, TTFT and TPOT of the bare engine and of its peers.

Peers (Transformers with continuous and with static batching, vLLM, llama.cpp) serve the same file
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
        help="repeatable; static: Transformers' generate on padded batches; unquantised, wide "
        "(weights as float32 in memory), no-prefix-cache, no-offload: ourselves with other "
        "settings",
    )
    parser.add_argument(
        "--floor",
        action="append",
        default=[],
        choices=("mkl", "fbgemm", "torch4"),
        help="beside the linear layers alone, of this kind, on the same steps; repeatable",
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    floors = [f"{comparison.FLOOR} {kind}" for kind in arguments.floor]
    return comparison.compare(
        arguments, [comparison.OURS, *dict.fromkeys([*arguments.peer, *floors])]
    )
