"""The process that validates answers: reads (schema, text) from stdin, and writes the problem, or
nil, to stdout.

Checking an answer against a schema may take any amount of time. The kernel ends the process after
CPU_LIMIT_S of one check, and the worker notices. jsonschema-rs validates: it supports all of draft
2020-12, reads patterns as ECMA-262 does, limits their backtracking, and takes microseconds where
jsonschema takes milliseconds. The file is started by path and imports nothing of this package.
"""

import json
import signal
import sys
from collections import OrderedDict
from decimal import Decimal
from typing import Any

import jsonschema_rs
import msgspec

CPU_LIMIT_S = 5.0
MAX_KEPT = 256
MAX_CHARS = 300


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a killed worker ends this process too
    source, target = sys.stdin.buffer, sys.stdout.buffer
    validators: OrderedDict[bytes, Any] = OrderedDict()
    while header := source.read(4):
        question = source.read(size := int.from_bytes(header, "big"))
        if len(question) < size:  # the worker was killed while it wrote
            break
        schema, text = msgspec.msgpack.decode(question, type=tuple[bytes, str])
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        answer = msgspec.msgpack.encode(_problem(validators, schema, text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(len(answer).to_bytes(4, "big") + answer)
        target.flush()


def _problem(validators: OrderedDict[bytes, Any], schema: bytes, text: str) -> str | None:
    try:
        value = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {str(error)[:MAX_CHARS]}"
    try:
        validator = _validator(validators, schema)
        broken = next(validator.iter_errors(value), None)
    except Exception as problem:
        return f"it cannot be checked: {_first_line(problem)}"
    if broken is None:
        return None
    where = "/".join(str(step) for step in broken.instance_path)
    return (
        f"{str(broken.message)[:MAX_CHARS]} (at {'/' + where[:MAX_CHARS] if where else 'the top'})"
    )


def _validator(validators: OrderedDict[bytes, Any], schema: bytes) -> Any:
    found = validators.get(schema)
    if found is None:
        found = validators[schema] = jsonschema_rs.validator_for(
            json.loads(schema), validate_formats=True, retriever=_nothing
        )
        if len(validators) > MAX_KEPT:
            validators.popitem(last=False)
    else:
        validators.move_to_end(schema)
    return found


def _nothing(uri: str) -> Any:
    raise ValueError(f"{uri} is not part of the schema")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n", 1)[0] or type(error).__name__)[:MAX_CHARS]


if __name__ == "__main__":
    main()
