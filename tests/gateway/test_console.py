"""The files of the console: their headers, and that they name nothing outside of the gateway."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.gateway.conftest import running_gateway
from tokenmill_gateway.console import FOLDER, PAGE


@pytest.mark.redis
async def test_each_file_of_the_page_is_served_without_a_key_under_a_strict_policy(
    redis_url: str, database: str
) -> None:
    async with (
        running_gateway(redis_url, database, is_open=False) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        for name in sorted(path.name for path in FOLDER.iterdir()):
            path = "/" if name == PAGE else f"/console/{name}"
            answer = await client.get(path)
            assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes()), name
            policy = answer.headers["content-security-policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= {
                *policy
            }
            assert not any("unsafe" in each or "http" in each for each in policy)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            etag = answer.headers["etag"]
            again = await client.get(path, headers={"If-None-Match": f'"other", W/{etag}'})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
            other = await client.get(path, headers={"If-None-Match": '"other"'})
            assert other.status_code == 200


@pytest.mark.redis
async def test_a_name_that_is_no_file_of_the_page_is_not_there(
    redis_url: str, database: str
) -> None:
    async with (
        running_gateway(redis_url, database, is_open=False) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        for name in ("console.py", "none.js", "..%2Fconsole.py", "", "page/console.js", "%00"):
            answer = await client.get(f"/console/{name}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), (
                name
            )
        assert (await client.post("/")).status_code == 405


def test_the_page_has_no_script_of_its_own_line_and_names_no_other_host() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|[\"'(]//\w", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
    page = (FOLDER / PAGE).read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for name in re.findall(r'(?:src|href)="/console/([^"]+)"', page):
        assert (FOLDER / name).is_file(), name
