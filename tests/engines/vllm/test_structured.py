"""Structured output and tool calls through the whole service: valid on each kind of engine, and
for greedy answers the same text.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from tests.engines.vllm.schemas import SCHEMAS
from tests.engines.vllm.service import OWN, START_S, Service
from tests.support.vllm import needs_vllm
from tests.support.worker import client_of
from tests.text.chat.families import HERMES
from tokenmill_schemas.result import JobResult, JobStatus

pytestmark = [
    pytest.mark.redis, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(3_000), needs_vllm,
]  # fmt: skip
KINDS: dict[str, dict[str, object]] = {"vllm": {}, "own": OWN}
SEEDS = (1, 2)  # of drawn answers
CALL = {"name": "person", "parameters": SCHEMAS["a person"], "strict": True}
EXPRESSION = r"[a-f]{4,8}-[0-9]{3}(, (yes|no)){2}"
GRAMMAR = 'root ::= "(" item ("," item){2,4} ")"\nitem ::= [a-c] [0-9]'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
        "end": "</n>",
    },
}


def text_of(result: JobResult) -> str:
    (call,) = result.tool_calls or [None]
    return result.text if call is None else call.arguments


def is_of(schema: dict[str, Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return check


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


# what binds an answer, and whether a text follows it
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    **{
        name: ({"response_format": {"json_schema": schema}}, is_of(schema))
        for name, schema in SCHEMAS.items()
    },
    "an expression": ({"response_format": {"regex": EXPRESSION}}, matches(EXPRESSION)),
    "a grammar": (
        {"response_format": {"grammar": GRAMMAR}},
        matches(r"\([a-c][0-9](,[a-c][0-9]){2,4}\)"),
    ),
    "a choice": ({"response_format": {"choice": ["left", "right"]}}, matches("left|right")),
    "a tag": ({"response_format": TAG}, matches("<n> ?(true|false)</n>")),
    "a tool call": (
        {"tools": [{"type": "function", "function": CALL}], "tool_choice": "required",
         "parallel_tool_calls": False},
        is_of(SCHEMAS["a person"]),
    ),
}  # fmt: skip


async def answered(service: Service) -> dict[str, list[JobResult]]:
    """Return the greedy answer of each form, and behind it the drawn ones."""
    drawn: list[dict[str, Any]] = [{"temperature": 1.0, "seed": seed} for seed in SEEDS]
    async with client_of(service.url, service.database) as client:
        jobs = {
            name: [
                await client.submit(
                    messages=[{"role": "user", "content": f"Give me {name}."}],
                    max_tokens=300, **form, **sampling,
                )
                for sampling in ({"temperature": 0.0}, *drawn)
            ]
            for name, (form, _) in FORMS.items()
        }  # fmt: skip
        return {
            name: [await client.result(job, timeout=START_S) for job in of]
            for name, of in jobs.items()
        }


@pytest.fixture(scope="module")
def results(
    make_service: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[JobResult]]]:
    """The answers of one engine of each kind, in turn on one queue."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{{ (tools or []) | tojson }}\n" + HERMES)
    service = make_service(max_num_seqs=16, chat_template=template, tool_format="hermes")
    found = {}
    for kind, settings in KINDS.items():
        service.start(**settings)
        service.engine()
        found[kind] = asyncio.run(answered(service))
        service.end()
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_answer_follows_its_form(
    results: dict[str, dict[str, list[JobResult]]], kind: str, form: str
) -> None:
    follows = FORMS[form][1]
    for result in results[kind][form]:
        assert (result.status, result.error) == (JobStatus.SUCCEEDED, None)
        assert follows(text_of(result)), result.text


@pytest.mark.parametrize("form", FORMS)
def test_a_greedy_answer_of_a_form_is_the_same_on_both_kinds(
    results: dict[str, dict[str, list[JobResult]]], form: str
) -> None:
    ours, theirs = results["own"][form][0], results["vllm"][form][0]
    assert text_of(ours) == text_of(theirs)
    assert ours.finish_reason == theirs.finish_reason
