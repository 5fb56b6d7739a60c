"""The head of every script: one table of keys, arguments, reply and errors, which is true."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from tokenmill.transport import scripts as producer_scripts
from tokenmill.transport.scripts import Script
from tokenmill_worker.queue import scripts as worker_scripts

SCRIPTS = {
    script.name: script
    for script in (
        producer_scripts.SUBMIT,
        producer_scripts.CANCEL,
        producer_scripts.REDRIVE,
        producer_scripts.COLLECT,
        producer_scripts.LOOK,
        *worker_scripts.ALL,
    )
}
BY_NAME = ("claim", "heartbeat")


def head_of(name: str) -> str:
    """Return the comment at the top of a script's own file."""
    package = "tokenmill_worker.queue" if SCRIPTS[name] in worker_scripts.ALL else "tokenmill"
    text = files(package).joinpath("lua", f"{name}.lua").read_text("utf-8")
    return re.match(r"(?:--.*\n)+", text)[0]  # type: ignore[index]


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_s_head_has_one_row_of_each_kind(name: str) -> None:
    head = head_of(name)
    assert head.startswith(f"-- {name}: ")
    assert re.findall(r"^-- ([A-Z]\w+)  +\S", head, re.MULTILINE) == [
        "Keys", "Arguments", "Reply", "Errors",
    ]  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_each_script_s_head_lists_the_options_that_it_reads(name: str) -> None:
    assert re.findall(r"^--   (\w+)  ", head_of(name), re.MULTILINE) == options_of(SCRIPTS[name])


def options_of(script: Script) -> list[str]:
    return re.findall(r"\boptions\.(?!lua)(\w+)", script.text)
