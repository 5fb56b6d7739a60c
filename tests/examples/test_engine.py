"""Tests of the example of an engine, and of the guide that shows it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import GUIDES, ROOT, python_of
from tests.support.worker import client_of, database_url, running_worker
from tokenmill_worker.engines.process.host import CHILD_MODULE
from tokenmill_worker.engines.synthetic.runner import TOKENIZER

EXAMPLE = ROOT / "ops" / "examples" / "engine"


@pytest.mark.redis
async def test_a_worker_runs_an_engine_of_another_package(redis_url: str, tmp_path: Path) -> None:
    database = database_url(tmp_path)
    given: dict[str, Any] = {"engine": "ops.examples.engine", "model": str(TOKENIZER)}
    async with (
        running_worker(redis_url, database, in_process=True, **given),
        client_of(redis_url, database) as client,
    ):
        job = await client.submit(prompt="Tell me: stu")
        result = await client.result(job, timeout=30)
        assert (result.choices[0].text, result.choices[0].finish_reason) == ("vwxyz", "stop")
        job = await client.submit(prompt="abc", n=2, max_tokens=4)
        result = await client.result(job, timeout=30)
        assert [choice.text for choice in result.choices] == ["defg", "defg"]


def test_the_skeleton_of_the_guide_is_the_example() -> None:
    config, skeleton = python_of(GUIDES / "bring-your-own-engine.md")
    assert config == (EXAMPLE / "config.py").read_text("utf-8")
    assert skeleton == (EXAMPLE / "serve.py").read_text("utf-8")


def test_the_skeleton_has_50_lines() -> None:
    _, body = re.split(r"(?m)^(?=def draw)", (EXAMPLE / "serve.py").read_text("utf-8"))
    assert len([line for line in body.splitlines() if line]) <= 50


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({}, True),
        ({"--engine-command": shlex.join([sys.executable, "-m", CHILD_MODULE])}, True),
        ({"--engine-command": "false"}, False),
        ({"--engine-settings": '{"speed": 9}'}, False),
    ],
)
def test_the_suite_tries_a_named_engine(options: dict[str, str], passed: bool) -> None:
    given = {"--engine": "ops.examples.engine", **options}
    words = [word for option in given.items() for word in option]
    test = "tests/engines/conformance/test_process.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test, *words]
    done = subprocess.run([*command, "-k", "status_0"], cwd=ROOT, capture_output=True, text=True)
    assert ("1 passed, 3 deselected" in done.stdout) == passed, done.stdout
