"""Every code that the gateway answers stands with its status on the page of errors."""

from __future__ import annotations

import re

from tests.support.pages import GUIDES, ROOT
from tokenmill.openai import errors

SOURCES = (ROOT / "api_client" / "tokenmill_gateway").glob("*.py")
OF = re.compile(r'(?:HttpRefusal\.of|ApiError)\(\s*(\d{3}), "(\w+)"')


def test_every_code_of_the_gateway_is_on_the_page_of_errors() -> None:
    named = {pair for path in SOURCES for pair in OF.findall(path.read_text(encoding="utf-8"))}
    named |= {(str(status), code) for status, code in errors._OF_EXCEPTIONS.values()}
    assert len(named) >= 25
    page = (GUIDES / "errors.md").read_text(encoding="utf-8")
    section = page[page.index("## The gateway") : page.index("## Sentences of a worker")]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")]
    shown = {
        (status, code)
        for statuses, codes in rows
        for status in re.findall(r"\d{3}", statuses)
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert named <= shown
