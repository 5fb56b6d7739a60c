"""The console at `/` in a real browser, before a real gateway, queue, worker and batches."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from tests.gateway.conftest import Gateway, new_key, running_gateway
from tests.gateway.hosted_batches import running
from tests.support.browser import NodeUnavailable, chromium_folder, open_browser
from tests.support.lifecycle import missing
from tests.support.valkey import ControlledValkey
from tests.support.waiting import until
from tests.support.worker import QUEUE, client_of, database_url, running_worker
from tokenmill.sql.engine import open_engine
from tokenmill_worker.settings import load_settings
from tokenmill_worker.tasks.batches import BatchRuns

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]
MODEL = "synthetic?step_ms=15&mean_tokens=1000000000000"  # no answer ends early
WAIT_MS = 30_000
KEY = "sessionStorage.getItem('tokenmill.key')"
TITLE = "Why is <img src=x onerror=alert(1)> the sky blue?"
PHONE = {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def module_redis(valkey: ControlledValkey) -> Iterator[str]:
    with valkey.client() as client:
        client.flushall()
        yield valkey.url
        client.flushall()


@pytest.fixture(scope="module")
def chromium() -> Path:
    try:
        return chromium_folder()
    except NodeUnavailable as error:
        missing(str(error))


@contextlib.asynccontextmanager
async def running_tasks(redis_url: str, database: str, files: str) -> AsyncIterator[None]:
    """Run due batches inside the block, as `tokenmill tasks` does."""
    settings = load_settings({"redis_url": redis_url, "database_url": database, "files": files})
    engine = open_engine(database)
    runs = BatchRuns(settings, engine, time.time, contextlib.nullcontext)
    with contextlib.closing(runs):
        async with running(runs):
            yield
    engine.dispose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    module_redis: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A gateway that asks for keys, with a worker of 15 ms a token and the batches' tasks."""
    folder = tmp_path_factory.mktemp("console")
    database, files = database_url(folder), str(folder / "files")
    async with (
        running_worker(module_redis, database, model=MODEL),
        running_tasks(module_redis, database, files),
        running_gateway(
            module_redis, database, is_open=False, models={MODEL: QUEUE}, files=files
        ) as gateway,
    ):
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(chromium: Path) -> AsyncIterator[Browser]:
    async with open_browser(chromium) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, gateway: Gateway) -> AsyncIterator[Page]:
    """The console in a new tab, with a key of a tenant of its own. An error in its script, a file
    from elsewhere or a breach of its policy fails the test.
    """
    faults: list[str] = []
    async with await browser.new_context(viewport=PHONE, accept_downloads=True) as context:  # type: ignore[arg-type]
        shown = await context.new_page()
        shown.set_default_timeout(WAIT_MS)
        shown.on("pageerror", lambda error: faults.append(str(error)))
        shown.on("console", lambda said: faults.append(said.text) if is_breach(said.text) else None)
        shown.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((gateway.url, "blob:")) else faults.append(asked.url)
            ),
        )
        await shown.goto(gateway.url)
        await enter(shown, new_key(gateway.database, f"tenant-{time.monotonic_ns()}"))
        yield shown
    assert faults == []


def is_breach(text: str) -> bool:
    return "Content Security Policy" in text


async def enter(page: Page, key: str) -> None:
    await page.get_by_label("API key", exact=True).fill(key)
    await page.get_by_role("button", name="Use key").click()
    await expect(page.get_by_label("Model")).to_have_value(MODEL, timeout=WAIT_MS)


async def send(page: Page, prompt: str, max_tokens: int) -> None:
    await page.get_by_label("Max tokens").fill(str(max_tokens))
    await page.get_by_label("Prompt").fill(prompt)
    await page.get_by_label("Prompt").press("Enter")


async def some_tokens(page: Page, count: int) -> str:
    """Return the last answer once it has that many characters: a synthetic token has one."""

    async def has_grown() -> bool:
        return len(await answer_of(page)) >= count

    await until(has_grown, timeout_s=WAIT_MS / 1000)
    return await answer_of(page)


async def answer_of(page: Page) -> str:
    return str(
        await page.evaluate("[...document.querySelectorAll('.answer')].at(-1)?.textContent ?? ''")
    )


async def ends(page: Page, status: str) -> str:
    """Wait until the last answer has that status, and return its text."""
    await expect(page.locator("#turns .status").last).to_have_text(status, timeout=WAIT_MS)
    return await answer_of(page)


async def kept(page: Page) -> Any:
    """Return the turns that the tab keeps."""
    return json.loads(await page.evaluate("sessionStorage.getItem('tokenmill.turns')"))


async def recorded(gateway: Gateway, turn: Any) -> str:
    job = turn["id"].removeprefix("resp_")
    async with client_of(gateway.redis_url, gateway.database) as client:
        return (await client.result(job, timeout=30)).text


async def test_an_answer_streams_as_text_goes_on_after_a_reload_and_is_continued(
    gateway: Gateway, page: Page
) -> None:
    await send(page, TITLE, 250)
    await some_tokens(page, 20)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.reload()
    before = await some_tokens(page, 20)
    await expect(page.locator("#turns .status").last).to_have_text("in progress")
    text = await ends(page, "incomplete")
    (turn,) = await kept(page)
    assert len(before) < len(text)
    assert text == await recorded(gateway, turn)
    (resumed,) = [url for url in asked if "starting_after" in url]
    assert int(resumed.partition("starting_after=")[2]) > 20, "it began at the beginning"
    await expect(page.locator(".asked")).to_have_text(TITLE)
    await expect(page.locator("#turns img")).to_have_count(0)
    await expect(page.locator("#turns")).to_contain_text("250 output tokens · token limit reached")
    await send(page, "And at night?", 5)
    await ends(page, "incomplete")
    first, second = await kept(page)
    assert second["request"]["previous_response_id"] == first["id"]
    await page.reload()
    await expect(page.locator(".answer")).to_have_text([text, second["text"]])
    await page.get_by_role("link", name="Usage").click()
    await expect(page.locator("#usage-table tbody td")).to_contain_text([MODEL, "2"])
    await page.get_by_role("link", name="Chat").click()
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator("#turns li")).to_have_count(0)


async def test_a_broken_connection_resumes_the_answer_and_a_lost_first_answer_makes_no_second_job(
    gateway: Gateway, page: Page
) -> None:
    sent: list[str] = []

    async def lose(route: Route) -> None:
        """The request arrives, its answer is lost."""
        sent.append(route.request.headers["idempotency-key"])
        if len(sent) == 1:
            headers = dict(route.request.headers)
            async with httpx.AsyncClient() as other:
                url = f"{gateway.url}/v1/responses"
                body = route.request.post_data
                async with other.stream("POST", url, headers=headers, content=body) as answer:
                    assert answer.status_code == 200
            await route.abort("connectionreset")
        else:
            await route.continue_()

    await page.route("**/v1/responses", lose)
    await send(page, "Lost", 60)
    text = await ends(page, "incomplete")
    (turn,) = await kept(page)
    assert len(sent) == 2
    assert len(set(sent)) == 1
    assert text == await recorded(gateway, turn)
    headers = {"Authorization": f"Bearer {await page.evaluate(KEY)}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
        since = {"start_time": int(time.time())}
        used = (await client.get("/v1/organization/usage/completions", params=since)).json()
    assert used["data"][0]["results"][0]["num_model_requests"] == 1
    await page.context.set_offline(True)
    await send(page, "Offline", 5)
    await expect(page.locator("#notice")).to_contain_text("cannot be reached")
    await page.context.set_offline(False)
    await ends(page, "incomplete")
    await expect(page.locator("#notice")).to_be_hidden()


async def test_cancel_ends_an_answer_with_its_text(gateway: Gateway, page: Page) -> None:
    await send(page, "Without end", 3000)
    before = await some_tokens(page, 5)
    await page.get_by_role("button", name="Cancel").click()
    text = await ends(page, "cancelled")
    (turn,) = await kept(page)
    assert before == text[: len(before)]
    assert text == await recorded(gateway, turn)
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()


async def test_a_batch_is_started_watched_downloaded_and_another_cancelled(page: Page) -> None:
    await page.get_by_role("link", name="Batches").click()
    await start_batch(page, "short.jsonl", lines=12, max_tokens=3)
    item = page.locator("#batch-list li", has_text="short.jsonl")
    await expect(item.locator(".status")).to_have_text("completed", timeout=WAIT_MS)
    await expect(item).to_contain_text("12 of 12 lines")
    assert await item.locator("progress").evaluate("bar => bar.value / bar.max") == 1
    async with page.expect_download() as downloading:
        await item.get_by_role("button", name="Download output").click()
    path = await (await downloading.value).path()
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(f"l{n}" for n in range(12))
    await start_batch(page, "long.jsonl", lines=40, max_tokens=2000)
    item = page.locator("#batch-list li", has_text="long.jsonl")
    await item.get_by_role("button", name="Cancel").click()
    await expect(item.locator(".status")).to_have_text("cancelled", timeout=WAIT_MS)
    await expect(page.locator("#batch-list .name")).to_have_text(["long.jsonl", "short.jsonl"])


async def start_batch(page: Page, name: str, *, lines: int, max_tokens: int) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True}
    whole = "".join(
        json.dumps({"custom_id": f"l{n}", "method": "POST", "url": "/v1/completions", "body": body})
        + "\n"
        for n in range(lines)
    )
    file: Any = {"name": name, "mimeType": "application/jsonl", "buffer": whole.encode()}
    await page.get_by_label("Requests, a .jsonl file").set_input_files(file)
    await page.get_by_role("button", name="Start batch").click()


async def test_a_refusal_is_shown_where_it_happens_and_a_key_stays_in_its_tab(
    gateway: Gateway, page: Page
) -> None:
    await page.get_by_role("link", name="Batches").click()
    file: Any = {"name": "no.jsonl", "mimeType": "text/plain", "buffer": b"nothing\n"}
    await page.get_by_label("Requests, a .jsonl file").set_input_files(file)
    await page.get_by_role("button", name="Start batch").click()
    await expect(page.locator("#batch-error")).to_contain_text("first line names no url")
    await page.get_by_role("link", name="Chat").click()
    await send(page, "Too long " * 40_000, 5)
    await ends(page, "failed")
    await expect(page.locator("#turns .error")).not_to_be_empty()
    await expect(page.get_by_label("Prompt")).not_to_be_empty()
    is_wide = "document.documentElement.scrollWidth > innerWidth"
    assert not await page.evaluate(is_wide), "the page scrolls sideways on a phone"
    other = await page.context.new_page()
    await other.goto(gateway.url)
    await expect(other.get_by_label("API key", exact=True)).to_be_focused()
    await other.get_by_label("API key", exact=True).fill("tmk-wrong-key")
    await other.keyboard.press("Enter")
    await expect(other.get_by_role("alert")).to_contain_text("This key is not accepted")
    await page.get_by_role("button", name="Change key").click()
    assert await page.evaluate("Object.keys(sessionStorage)") == []
    assert await page.evaluate("Object.keys(localStorage)") == []
