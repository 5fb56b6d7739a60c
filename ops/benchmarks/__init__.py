"""Measurements, one command per module: `ops/bench COMMAND`, or `python -m ops.benchmarks COMMAND`.

A command is a module of `commands` that COMMANDS of `__main__.py` names, with two functions:

    add_arguments(parser: argparse.ArgumentParser) -> None
    run(arguments: argparse.Namespace) -> dict[str, object]

`run` prints a report for people and returns what `--json FILE` writes: figures as
`{"results": {group: {case: {figure: value}}}}`, a group for each printed table. If it sets "ok" to
False, the exit status is 1.
"""
