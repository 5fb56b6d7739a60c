"""The example's page in a real browser, with a real backend, queue, worker and database."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Route, expect

from tests.examples.conftest import Backend
from tests.support.valkey import ControlledValkey
from tests.support.worker import client_of, running_worker

pytestmark = pytest.mark.redis

SLOW = "synthetic?step_ms=15&mean_tokens=1000000000000"  # no answer ends early
WAIT_MS = 30_000
PHONE = {"width": 360, "height": 740}


async def open_page(browser: Browser, backend: Backend, **options: Any) -> Page:
    """Open the page as a new visitor. An error in the page's script fails the test."""
    page = await (await browser.new_context(**options)).new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: pytest.fail(f"the page's script failed: {error}"))
    await page.goto(backend.url)
    return page


async def ask(page: Page, prompt: str, max_tokens: int) -> str:
    """Ask a question; return the job's id once the first tokens are shown."""
    await page.get_by_label("Prompt").fill(prompt)
    await page.get_by_label("Max tokens").fill(str(max_tokens))
    before = page.url
    await page.get_by_role("button", name="Send").click()
    await page.wait_for_url(lambda url: url != before)
    await some_tokens(page, 1)
    return page.url.partition("#")[2]


async def some_tokens(page: Page, count: int) -> str:
    """Return the answer once it has that many characters; each model-free token is one."""
    async with asyncio.timeout(WAIT_MS / 1000):
        while True:
            text = await answer_of(page)
            if len(text) >= count:
                return text
            await asyncio.sleep(0.02)


async def answer_of(page: Page) -> str:
    return str(await page.evaluate("document.getElementById('answer').textContent"))


async def ends(page: Page, status: str) -> str:
    """Wait for the end and return the answer."""
    await expect(page.locator("#status")).to_have_text(status, timeout=WAIT_MS)
    return await answer_of(page)


async def recorded(redis_url: str, backend: Backend, job: str) -> str:
    async with client_of(redis_url, backend.database) as client:
        return (await client.result(job, timeout=30)).text


@pytest.mark.slow
async def test_an_answer_is_streamed_and_listed_in_history_and_usage(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    prompt = "Is <img src=x onerror=alert(1)> “markup”?"
    async with running_worker(redis_url, backend.database, model=SLOW):
        page = await open_page(browser, backend)
        await expect(page.locator("#no-history")).to_be_visible()
        job = await ask(page, prompt, 60)
        before = await some_tokens(page, 5)
        await expect(page.locator("#status")).to_have_text("running")
        text = await ends(page, "succeeded")
        assert len(before) < len(text)
        async with client_of(redis_url, backend.database) as client:
            result = await client.result(job, timeout=30)
        assert text == result.text
        await expect(page.locator("#facts")).to_contain_text("60 tokens · token limit reached")
        await expect(page.locator("#title")).to_have_text(prompt)
        await expect(page.locator("#history .name")).to_have_text([prompt], timeout=WAIT_MS)
        await expect(page.locator("#usage tbody tr td")).to_have_text(
            ["1", str(result.usage.prompt_tokens), "60"]
        )
        await page.reload()  # what is over is shown as it was
        assert await ends(page, "succeeded") == text
        await expect(page.locator("#title")).to_have_text(prompt)


@pytest.mark.slow
async def test_a_running_answer_is_listed_in_every_tab_until_its_row_replaces_it(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    async with running_worker(redis_url, backend.database, model=SLOW):
        page = await open_page(browser, backend)
        await ask(page, "Still running", 150)
        await expect(page.locator("#history li")).to_contain_text(["Still running"])
        second = await page.context.new_page()
        await second.goto(backend.url)
        await expect(second.locator("#history li")).to_contain_text(["not ended yet"])
        await second.locator("#history a").click()
        await expect(second.locator("#title")).to_have_text("Still running")
        await ends(second, "succeeded")
        await expect(second.locator("#history li")).to_contain_text(["150 tokens"])


@pytest.mark.slow
async def test_the_token_limit_is_kept_after_a_reload(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    async with running_worker(redis_url, backend.database, model=SLOW):
        page = await open_page(browser, backend)
        await ask(page, "Few", 7)
        await page.reload()
        await expect(page.get_by_label("Max tokens")).to_have_value("7")


@pytest.mark.slow
async def test_a_reload_during_a_stream_continues_the_answer(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    async with running_worker(redis_url, backend.database, model=SLOW):
        page = await open_page(browser, backend)
        job = await ask(page, "Reload me", 150)
        before = await some_tokens(page, 20)
        await page.reload()
        after = await some_tokens(page, len(before))
        assert len(after) < 150, "the job was over before the reload"
        text = await ends(page, "succeeded")
        assert text == await recorded(redis_url, backend, job)
        assert text.startswith(before)
        await expect(page.locator("#title")).to_have_text("Reload me")


@pytest.mark.slow
async def test_a_restarted_backend_continues_the_stream_at_the_browser_s_position(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    async with running_worker(redis_url, backend.database, model=SLOW):
        page = await open_page(browser, backend)
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        job = await ask(page, "Restart under me", 200)
        before = await some_tokens(page, 20)
        await asyncio.to_thread(backend.stop, signal.SIGKILL)
        await expect(page.locator("#notice")).to_contain_text("reconnecting", timeout=WAIT_MS)
        await backend.start()
        text = await ends(page, "succeeded")  # sent from the beginning again, it would be longer
        assert text == await recorded(redis_url, backend, job)
        assert text.startswith(before)
        assert sum(url.endswith("/events") for url in requested) >= 2
        await expect(page.locator("#notice")).to_have_text("")


@pytest.mark.slow
async def test_the_page_shows_an_unreachable_queue_until_the_next_token(
    make_valkey: Callable[..., ControlledValkey], database: str, browser: Browser, tmp_path: Path
) -> None:
    server = make_valkey(directory=tmp_path / "valkey")
    backend = Backend(server.url, database, tmp_path / "backend.log")
    await backend.start()
    try:
        async with running_worker(server.url, database, model=SLOW):
            page = await open_page(browser, backend)
            job = await ask(page, "Go away", 600)
            await asyncio.to_thread(server.stop)
            away = "The service is away. Your answer goes on as soon as it is back."
            await expect(page.locator("#notice")).to_have_text(away, timeout=WAIT_MS)
            await page.reload()
            await expect(page.locator("#notice")).to_have_text(away, timeout=WAIT_MS)
            await page.get_by_label("Prompt").fill("Hello?")
            async with page.expect_response("**/api/jobs") as refused:
                await page.get_by_role("button", name="Send").click()
            assert (await refused.value).status == 503
            await expect(page.locator("#notice")).to_contain_text("The service is away.")
            await asyncio.to_thread(server.start)
            text = await ends(page, "succeeded")
            await expect(page.locator("#notice")).to_have_text("")
            await expect(page.locator("#error")).to_be_hidden()
            assert text == await recorded(server.url, backend, job)
    finally:
        await asyncio.to_thread(backend.stop)


@pytest.mark.slow
async def test_a_cancelled_answer_keeps_its_generated_text(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    async with running_worker(redis_url, backend.database, model=SLOW):
        page = await open_page(browser, backend)
        job = await ask(page, "Cancel me", 3000)
        before = await some_tokens(page, 10)
        await page.get_by_role("button", name="Cancel").click()
        text = await ends(page, "cancelled")
        await expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
        await expect(page.locator("#history .status")).to_have_text(["cancelled"], timeout=WAIT_MS)
        assert text.startswith(before)
        assert len(text) < 3000
        assert text == await recorded(redis_url, backend, job)


@pytest.mark.slow
async def test_a_cancel_answered_after_the_end_does_not_change_the_page(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    async with running_worker(redis_url, backend.database, model=SLOW):
        page = await open_page(browser, backend)
        await ask(page, "Cancel me", 3000)

        async def answer_late(route: Route) -> None:
            answer = await route.fetch()
            await ends(page, "cancelled")
            await route.fulfill(response=answer)

        await page.route("**/cancel", answer_late)
        async with page.expect_response("**/cancel") as answered:
            await page.get_by_role("button", name="Cancel").click()
        await (await answered.value).finished()
        await page.evaluate("new Promise(done => setTimeout(done, 100))")
        assert await page.locator("#status").text_content() == "cancelled"
        await expect(page.get_by_role("button", name="Cancel")).to_be_hidden()


@pytest.mark.slow
async def test_errors_are_shown_on_the_page(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    async with running_worker(redis_url, backend.database, model="synthetic?length=64"):
        page = await open_page(browser, backend)
        await page.get_by_label("Prompt").fill("x" * 200)
        await page.get_by_role("button", name="Send").click()
        await ends(page, "failed")
        await expect(page.locator("#error")).to_contain_text("model's length is 64")
        await expect(page.locator("#history .status")).to_have_text(["failed"], timeout=WAIT_MS)
        await page.goto(f"{backend.url}/#no-such-job")
        await expect(page.locator("#error")).to_contain_text("no job no-such-job")
        await asyncio.to_thread(backend.stop)
        await page.get_by_label("Prompt").fill("Hello?")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator("#notice")).to_have_text("The server cannot be reached.")
        assert await page.get_by_label("Prompt").input_value() == "Hello?"


@pytest.mark.slow
async def test_a_user_cannot_read_another_user_s_job(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    async with running_worker(redis_url, backend.database, model=SLOW):
        job = await ask(await open_page(browser, backend), "My secret", 20)
        other = await open_page(browser, backend)
        await other.goto(f"{backend.url}/#{job}")
        await expect(other.locator("#error")).to_contain_text("no job")
        await expect(other.locator("#title")).to_have_text("")
        for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel")):
            response = await other.request.fetch(
                f"{backend.url}/api/jobs/{job}{path}", method=method
            )
            assert response.status == 404, path
        assert await (await other.request.get(f"{backend.url}/api/history")).json() == []


@pytest.mark.slow
async def test_the_page_fits_a_phone(redis_url: str, backend: Backend, browser: Browser) -> None:
    async with running_worker(redis_url, backend.database, model=SLOW):
        page = await open_page(browser, backend, viewport=PHONE)
        await ask(page, "word " + "x" * 300, 20)
        await ends(page, "succeeded")
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        await expect(page.get_by_role("button", name="Send")).to_be_visible()


@pytest.mark.slow
async def test_the_page_is_usable_by_keyboard_and_has_roles_and_names(
    redis_url: str, backend: Backend, browser: Browser
) -> None:
    """A job is asked and cancelled without a mouse, in dark mode; parts have roles and names."""
    async with running_worker(redis_url, backend.database, model=SLOW):
        page = await open_page(browser, backend, color_scheme="dark")
        await page.keyboard.type("Keys alone")  # the prompt has the focus at the start
        await press(page, "Send")
        await some_tokens(page, 5)
        await press(page, "Cancel")
        await ends(page, "cancelled")
        await expect(page.locator("#history .name")).to_have_count(1, timeout=WAIT_MS)
        await expect(page.locator("body")).to_match_aria_snapshot("""
            - banner:
              - heading "tokenmill" [level=1]
              - status
            - main:
              - region "Ask":
                - textbox "Prompt"
                - spinbutton "Max tokens"
                - spinbutton "Temperature"
                - button "Send"
              - article "Answer":
                - heading "Keys alone" [level=2]
                - status: cancelled
                - paragraph
            - complementary:
              - region "History":
                - heading "History" [level=2]
                - list:
                  - listitem:
                    - link /Keys alone/
              - region "Usage":
                - heading "Usage" [level=2]
                - table:
                  - rowgroup:
                    - row "Day Jobs Prompt Answer"
        """)


async def press(page: Page, button: str) -> None:
    """Move the focus to a button by Tab, and press it by Enter."""
    for _ in range(30):
        if await page.get_by_role("button", name=button).evaluate(
            "each => each === document.activeElement"
        ):
            break
        await page.keyboard.press("Tab")
    else:
        pytest.fail(f"Tab does not reach {button}")
    await page.keyboard.press("Enter")
