"""`ops/bench service`: the cost of queue, publishing and recording around the engine.

The whole service (Valkey with its log on disk, a worker, SQLite, a subscriber per job) and the bare
engine serve the same requests in the same run. Figures are the share of the bare engine's tokens
per second, the time of a token from its step's end to its subscriber, and the CPU time of each
process around the engine.

With `--engine vllm` the worker runs vLLM, and in turns with it run vLLM's AsyncLLM alone, `vllm
serve` behind a plain worker loop and behind Celery, and the service with our engine. After the
rounds each part of each service is killed once in the middle of the workload: the table has the
tokens that readers never got, and those that they got again. Five engines stay loaded: 24 GB of
memory suffice with `--pool-tokens 16384`.
"""

import argparse

from ops.benchmarks.commands import engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_options(parser)
    parser.add_argument("--engine", choices=("own", "vllm"), default="own")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    if arguments.engine == "own":
        return engine.compare(arguments, [engine.WHOLE_WAY, engine.OURS])
    arguments.kills = True
    return engine.compare(arguments, [*engine.OF_VLLM, engine.WHOLE_WAY])
