"""A finished answer that breaks its JSON schema is reported, for any schema and answer."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.publish.support import delivery_of, event
from tests.service.test_jobs import Bench, running
from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.checking import VIOLATION, AnswerChecker, child

AGE: dict[str, object] = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
}


@pytest.fixture
async def checker() -> AsyncIterator[AnswerChecker]:
    found = AnswerChecker()
    yield found
    await found.close()


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        (AGE, '{"age": 3}', None),
        (AGE, '{"age": "3"}', "(at /age)"),
        (AGE, "{}", "(at the top)"),
        (AGE, '{"age":', "it is not JSON"),
        ({"type": "number"}, "98E88127", None),
        ({"type": "number"}, "NaN", "it is not JSON"),
        ({"pattern": "^a$"}, '"a\\n"', "(at the top)"),
        ({"format": "date"}, '"2023-02-31"', "(at the top)"),
        ({"$ref": "http://x.test/y"}, "1", "it cannot be checked"),
    ],
)
async def test_each_schema_violation_is_reported(
    checker: AnswerChecker, schema: dict[str, object], text: str, problem: str | None
) -> None:
    found = await checker.violation(schema, text)
    assert found is None if problem is None else problem in str(found)


async def test_an_endless_check_is_stopped_and_the_next_check_runs(checker: AnswerChecker) -> None:
    defs: dict[str, object] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)
    }
    endless: dict[str, object] = {"$defs": {**defs, "d40": {"type": "null"}}, "$ref": "#/$defs/d0"}
    assert "could not be checked" in str(await checker.violation(endless, "1"))
    assert await checker.violation(AGE, '{"age": 3}') is None


async def test_a_cancelled_check_does_not_affect_the_next(checker: AnswerChecker) -> None:
    first = asyncio.create_task(checker.violation(AGE, "{}"))
    await asyncio.sleep(0)
    first.cancel()
    assert await checker.violation(AGE, '{"age": 3}') is None


@pytest.mark.parametrize(
    ("strict", "text", "end", "status", "code"),
    [
        (True, '{"age": 3}', FinishReason.STOP, JobStatus.SUCCEEDED, None),
        (True, "{}", FinishReason.STOP, JobStatus.FAILED, VIOLATION),
        (False, "{}", FinishReason.STOP, JobStatus.SUCCEEDED, VIOLATION),
        (True, '{"ag', FinishReason.LENGTH, JobStatus.SUCCEEDED, None),
    ],
)
async def test_a_strict_violation_fails_the_job_and_a_loose_one_is_noted(
    strict: bool, text: str, end: FinishReason, status: JobStatus, code: str | None
) -> None:
    wanted: dict[str, Any] = {"response_format": ResponseFormat(json_schema=AGE, strict=strict)}
    async with running(Bench()) as bench:
        request = JobRequest(
            job_id="job", prompt="hi", stream=True, params=SamplingParams(**wanted)
        )
        await bench.service.take([delivery_of(request)])
        await bench.host.step(event(text))
        await bench.host.step(event("", end=end))
        async with asyncio.timeout(60):
            while bench.service._owned:
                await bench.host.step()
        (finished,) = bench.record.finished
        result = finished.result
        assert (result.status, result.text, result.finish_reason) == (status, text, end)
        for said in (finished.result, finished.final_chunk):
            assert (said.error.code if said.error else None) == code
            assert said.status is status
        await bench.service.stop()


@pytest.mark.parametrize("part", [1.0, 0.5], ids=["a whole question", "half a question"])
def test_the_checking_process_ends_without_output_when_its_worker_is_killed(part: float) -> None:
    question = msgspec.msgpack.encode((json.dumps(AGE).encode(), '{"age": 3}'))
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, child.__file__],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    os.close(reader)
    message = len(question).to_bytes(4, "big") + question
    _, errors = process.communicate(message[: int(len(message) * part)], timeout=60)
    assert errors == b""
