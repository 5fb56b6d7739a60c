"""The README's example runs as it stands, but for the addresses; the files that it names exist."""

import asyncio
import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from ops.tools import pictures
from tests.support.worker import QUEUE, database_url, running_worker

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.redis
async def test_the_example_prints_a_streamed_answer(redis_url: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    database = database_url(tmp_path)
    places = {
        '"redis://localhost:6379/0"': f'"{redis_url}"',
        '"smollm2-135m-instruct"': f'"{QUEUE}"',
        '"sqlite:///tokenmill.db"': f'"{database}"',
    }
    for written, real in places.items():
        assert code.count(written) == 1, f"the example does not name {written}"
        code = code.replace(written, real)
    printed = io.StringIO()
    names: dict[str, object] = {}
    # no answer ends early
    async with running_worker(redis_url, database, model="synthetic?mean_tokens=1000000000000"):
        with contextlib.redirect_stdout(printed):
            await asyncio.to_thread(exec, code + "\nclient.close()\n", names)
    result: Any = names["result"]
    assert result.text
    assert (
        printed.getvalue()
        == f"{result.text}\n{result.finish_reason}, {result.usage.completion_tokens} tokens\n"
    )


def test_the_first_page_is_short() -> None:
    assert len(README.split()) <= 1000


def test_the_first_page_links_every_guide() -> None:
    guides = {f"ops/guides/{page.name}" for page in (ROOT / "ops" / "guides").glob("*.md")}
    assert guides <= set(re.findall(r"\]\(([\w/.-]+)\)", README))


def test_the_bar_chart_shows_the_table_of_speed() -> None:
    rows = pictures.speed_rows(README)
    assert [row.workload for row in rows] == ["decode", "mixed", "prefix", "prefill", "single"]
    assert list(rows[0].rates) == [1695, 396, 180]
    shown = (pictures.FOLDER / "speed.svg").read_text(encoding="utf-8")
    assert shown == pictures.speed(), "run ops/pictures speed"


@pytest.mark.parametrize("page", ["README.md", "ops/architecture.md", "ops/runbook.md"])
def test_files_that_the_pages_name_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    quoted = re.findall(r"`((?:api_client|worker|schemas|migrations|tests|ops)/[\w/.-]+)`", text)
    linked = [str(Path(page).parent / target) for target in re.findall(r"\]\(([\w/.-]+)\)", text)]
    assert quoted or linked
    missing = [name for name in quoted + linked if not (ROOT / name).exists()]
    assert missing == []


def test_tests_that_the_pages_name_exist() -> None:
    pages = [ROOT / "ops" / "architecture.md", ROOT / "ops" / "guides" / "features.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    missing = [
        name for name in set(re.findall(r"`(test_\w+)`", text)) if f"def {name}(" not in sources
    ]
    assert missing == []


def test_files_that_the_recipes_name_exist() -> None:
    text = (ROOT / "ops" / "contributing.md").read_text(encoding="utf-8")
    names = {name for name in re.findall(r"`([\w.-]+/[\w/.-]*)`", text) if "NAME" not in name}
    names |= set(re.findall(r"`(builders\.py|app\.py)`", text))
    assert len(names) > 30
    roots = (ROOT, ROOT / "worker" / "tokenmill_worker")
    assert [name for name in names if not any((root / name).exists() for root in roots)] == []
