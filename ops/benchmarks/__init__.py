"""Measurements: one command per module, `ops/bench COMMAND` (also `python -m ops.benchmarks COMMAND`).

A command is a module of this package with two functions:

    add_arguments(parser: argparse.ArgumentParser) -> None
    run(arguments: argparse.Namespace) -> dict[str, object]

`run` prints what people read and returns what `--json FILE` writes. It may set "ok": False, which
becomes exit status 1. To add one: write the module and name it in COMMANDS of `__main__.py`.
"""
