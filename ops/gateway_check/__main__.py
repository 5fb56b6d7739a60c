"""Tries unmodified clients against a gateway, and requests that schemathesis makes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from ops.gateway_check import fuzzing, unmodified
from ops.gateway_check.environments import CLIENTS


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ops/gateway-check", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("clients", "requests"), help="default: both")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=[], help="these clients")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    failed = 0
    if options.part != "requests":
        failed |= asyncio.run(unmodified.check(options.only))
    if options.part != "clients":
        failed |= asyncio.run(fuzzing.check(options.requests, options.seed))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
