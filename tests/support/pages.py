"""The pages of this repository, their code blocks, and how a test runs them."""

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.worker import QUEUE

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "ops" / "guides"


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        yield found[1], found[2]


def python_of(page: Path) -> list[str]:
    return [text for language, text in blocks(page) if language == "python"]


def at(code: str, redis_url: str, database: str) -> str:
    """Replace the usual addresses in `code` with those of this test's servers."""
    places = {
        "redis://localhost:6379/0": redis_url,
        "smollm2-135m-instruct": QUEUE,
        "sqlite:///tokenmill.db": database,
    }
    for written, real in places.items():
        code = code.replace(f'"{written}"', f'"{real}"')
    return code


async def run_shell(
    block: str, folder: Path, redis_url: str, database: str
) -> "subprocess.CompletedProcess[str]":
    """Run the lines of `block` in one shell in `folder`; the first that fails ends it."""
    (folder / ".venv").symlink_to(ROOT / ".venv")
    variables = {
        "TOKENMILL_REDIS_URL": redis_url,
        "TOKENMILL_DATABASE_URL": database,
        "TOKENMILL_QUEUE": QUEUE,
    }
    return await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", f"set -eu; source .venv/bin/activate\n{block}"],
        cwd=folder,
        env=os.environ | variables,  # noqa: TID251 - the child's
        capture_output=True,
        text=True,
        timeout=300,
    )
