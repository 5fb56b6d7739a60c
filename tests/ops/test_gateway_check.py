"""ops/gateway-check: how scripts of clients are run, counted and shown. The clients themselves are
tried by hand, in environments of their own.
"""

import re
import subprocess
import sys
from pathlib import Path

from ops.gateway_check.environments import CLIENTS, SCRIPTS
from ops.gateway_check.service import Serving
from ops.gateway_check.unmodified import table, tried

SERVING = Serving("http://127.0.0.1:9", "tmk-none")
SCRIPT = """
import os
from trying import URL, tried
tried("chat", "plain", lambda: None)
tried("chat", "stream", lambda: 1 / 0)
print("something else", os.environ["MODEL"])
"""


def command_of(folder: Path, script: str) -> list[str]:
    (folder / "script.py").write_text(f"import sys; sys.path[0] = {str(SCRIPTS)!r}\n{script}")
    return [sys.executable, str(folder / "script.py")]


async def test_a_thing_that_raises_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    found = await tried("curl", command_of(tmp_path, SCRIPT), SERVING)
    assert found == {"chat": {"plain": None, "stream": "ZeroDivisionError: division by zero"}}


async def test_a_script_that_ends_early_is_a_failure(tmp_path: Path) -> None:
    found = await tried("curl", command_of(tmp_path, SCRIPT + "import nothing_like_this"), SERVING)
    assert found["chat"]["plain"] is None
    assert "nothing_like_this" in str(found["the script"]["plain"])


async def test_a_client_that_tries_nothing_is_a_failure(tmp_path: Path) -> None:
    found = await tried("curl", command_of(tmp_path, "pass"), SERVING)
    assert found == {"the script": {"plain": "it tried nothing"}}


def test_the_table_has_passed_failed_and_a_dash_for_what_is_not_offered() -> None:
    lines = list(table({"openai": {"chat": {"plain": None, "tools": "ValueError: x"}}}))
    assert lines[-1].startswith("| openai 3.")
    assert lines[-1].endswith("| chat | passed | – | – | FAILED | – | – | – |")


async def test_a_client_that_cannot_reach_the_gateway_fails_at_everything() -> None:
    found = await tried("curl", CLIENTS["curl"].command("curl"), SERVING)
    assert all("CalledProcessError" in str(error) for error in found["responses"].values())
    assert list(found["responses"]) == ["plain", "stream", "structured", "tools", "resume"]


def test_every_client_has_its_script_and_exact_versions() -> None:
    for one in CLIENTS.values():
        assert (SCRIPTS / one.script).is_file()
        for requirement in one.requirements:
            assert re.search(r"==|<|.@", requirement), requirement


def test_the_command_names_its_clients() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ops.gateway_check", "--help"], capture_output=True, text=True
    )
    assert all(name in done.stdout for name in CLIENTS)
