"""The producer in JavaScript gives the ids, tokens and results of the Python client."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.browser import EXAMPLES, NodeUnavailable, node
from tests.support.lifecycle import missing
from tests.support.two_choices import TEXTS, read_two_choices
from tests.support.waiting import until
from tests.support.worker import QUEUE, client_of, running_worker
from tokenmill.transport.scripts import SUBMIT
from tokenmill_schemas.keys import Keys

pytestmark = pytest.mark.redis

SLOW = "synthetic?step_ms=10&mean_tokens=1000000000000"


async def output_of(*arguments: str, exits_with: int = 0) -> AsyncIterator[tuple[str, Any]]:
    """Yield the output of `producer.mjs --json` line by line.

    Its exit status is 1 for a job that did not succeed.
    """
    try:
        command = [node(), str(EXAMPLES / "producer.mjs"), "--queue", QUEUE, "--json", *arguments]
    except NodeUnavailable as error:
        missing(str(error))
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, limit=2**24
    )
    assert child.stdout is not None
    try:
        async for line in child.stdout:
            ((kind, value),) = json.loads(line).items()
            yield kind, value
        assert await asyncio.wait_for(child.wait(), 30) == exits_with
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def collect(*arguments: str, exits_with: int = 0) -> tuple[str, list[Any], Any]:
    """Return the job's id, its chunks and its result."""
    found = [pair async for pair in output_of(*arguments, exits_with=exits_with)]
    assert found[0][0] == "job"
    assert found[-1][0] == "result"
    return found[0][1], [value for kind, value in found if kind == "chunk"], found[-1][1]


def token_ids(chunks: list[Any]) -> list[int]:
    return [token for chunk in chunks for token in chunk.get("token_ids", [])]


def assert_without_gap(chunks: list[Any]) -> None:
    """Each chunk's index is the number of tokens before it; a chunk may carry several tokens."""
    num_tokens = 0
    for chunk in chunks:
        assert chunk["index"] == num_tokens
        num_tokens += len(chunk.get("token_ids", []))


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.get("text", "") for chunk in chunks)


async def test_the_javascript_producer_submits_streams_and_ends_like_the_python_client(
    redis_url: str, database: str
) -> None:
    url = ("--url", redis_url)
    async with running_worker(redis_url, database, model=SLOW), client_of(redis_url) as client:
        job, chunks, result = await collect(
            *url, "--max-tokens", "80", "--idempotency-key", "k", "Grüße, 🌍"
        )
        ours = await client.result(job, timeout=30)
        assert msgspec.convert(result, type(ours)) == ours
        assert tuple(token_ids(chunks)) == ours.token_ids
        assert text_of(chunks) == ours.text
        assert_without_gap(chunks)
        assert chunks[-1]["status"] == "succeeded"
        # the same request is the same job; its chunks come from the result
        again, retold, _ = await collect(
            *url, "--max-tokens", "80", "--idempotency-key", "k", "Grüße, 🌍"
        )
        assert again == job
        assert_without_gap(retold)
        assert token_ids(retold) == token_ids(chunks)
        assert text_of(retold) == text_of(chunks)
        _, rest, _ = await collect(*url, "--stream", job, "--starting-after", "70")
        assert tuple(token_ids(rest)) == ours.token_ids[70:]
        assert text_of(rest) == ours.text[ours.choices[0].text_ends[69] :]


def run_producer(
    script: Path, *arguments: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    try:
        command = [node(), str(script), *arguments]
    except NodeUnavailable as error:
        missing(str(error))
    environment = {**os.environ, **variables}  # noqa: TID251 - the child's
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=environment
    )


def test_the_javascript_producer_s_help_names_every_option() -> None:
    done = run_producer(EXAMPLES / "producer.mjs", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for option in (
        "--url",
        "--queue",
        "--max-tokens",
        "--idempotency-key",
        "--stream",
        "--lua",
        "--json",
    ):
        assert f"  {option}" in done.stdout


def test_a_copied_producer_names_its_missing_scripts_and_runs_with_them(
    tmp_path: Path, redis_url: str, allowed_keys: list[str]
) -> None:
    allowed_keys.append("tm:{q}:*")
    copy, wanted = (
        tmp_path / "producer.mjs",
        ("--url", redis_url, "--queue", QUEUE, "--stream", "none"),
    )
    copy.write_bytes((EXAMPLES / "producer.mjs").read_bytes())
    (tmp_path / "node_modules").symlink_to(EXAMPLES / "node_modules")
    done = run_producer(copy, *wanted)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert (
        "needs tokenmill's scripts common.lua, submit.lua and cancel.lua: name their folder"
        in done.stderr
    )
    lua = str(EXAMPLES.parents[1] / "api_client" / "tokenmill" / "lua")
    for done in (
        run_producer(copy, *wanted, "--lua", lua),
        run_producer(copy, *wanted, TOKENMILL_LUA=lua),
    ):
        assert "no job none" in done.stderr


@pytest.mark.parametrize("option", ["--max-tokens", "--starting-after"])
def test_an_invalid_count_is_refused_before_anything_is_sent(option: str) -> None:
    try:
        command = [node(), str(EXAMPLES / "producer.mjs"), "--queue", QUEUE, option, "abc", "Hello"]
    except NodeUnavailable as error:
        missing(str(error))
    done = subprocess.run(
        [*command, "--url", "redis://127.0.0.1:1"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"producer: {option} must be a whole number, not abc\n",
    )


async def test_the_javascript_producer_starts_inside_a_checkpoint(
    redis_url: str, database: str
) -> None:
    async with running_worker(redis_url, database, model=SLOW), client_of(redis_url) as client:
        job = await client.submit(prompt="Grüße, 🌍", max_tokens=250, ignore_eos=True, stream=False)

        async def has_a_checkpoint() -> bool:
            return (await client.status(job)).tokens > 0

        await until(has_a_checkpoint)
        _, rest, _ = await collect("--url", redis_url, "--stream", job, "--starting-after", "20")
        result = await client.result(job, timeout=30)
    assert rest[0]["index"] == 20
    assert tuple(token_ids(rest)) == result.token_ids[20:]
    assert text_of(rest) == result.text[result.choices[0].text_ends[19] :]


async def test_the_javascript_producer_reads_tokens_that_pubsub_lost_from_the_log(
    redis_url: str, database: str, valkey: Any
) -> None:
    """The server cuts its subscription again and again; each token of two choices comes once."""
    async with running_worker(redis_url, database, model=SLOW), client_of(redis_url) as client:
        job = await client.submit(prompt="Go", max_tokens=150, n=2, ignore_eos=True)
        chunks: list[Any] = []
        cuts = 0
        with valkey.client() as control:
            async for kind, value in output_of("--url", redis_url, "--stream", job):
                chunks += [value] if kind == "chunk" else []
                if len(chunks) % 50 == 25:
                    cuts += control.client_kill_filter(_type="pubsub")
        result = await client.result(job, timeout=30)
    assert cuts >= 2, "nothing was cut"
    for choice in result.choices:
        read = [chunk for chunk in chunks if chunk.get("choice", 0) == choice.index]
        assert_without_gap([chunk for chunk in read if "status" not in chunk])
        assert tuple(token_ids(read)) == choice.token_ids
        assert text_of(read) == choice.text


@pytest.mark.parametrize("from_result", [False, True])
async def test_text_behind_a_choice_s_last_token_is_printed_once(
    redis_url: str, valkey: Any, allowed_keys: list[str], from_result: bool
) -> None:
    allowed_keys.append("tm:{q}:*")

    async def read(job: str) -> list[str]:
        _, chunks, _ = await collect("--url", redis_url, "--stream", job)
        return [text_of([c for c in chunks if c.get("choice", 0) == i]) for i in (0, 1)]

    with valkey.client() as server:
        keys = Keys(QUEUE)
        assert await read_two_choices(server, keys, "two", read, from_result=from_result) == TEXTS


async def test_refusals_and_cancelled_jobs_are_printed(redis_url: str, database: str) -> None:
    """No worker: what is cancelled while it waits is over at once."""
    async with client_of(redis_url) as client:
        job = await client.submit(prompt="Never")
        await client.cancel(job)
        _, chunks, result = await collect("--url", redis_url, "--stream", job, exits_with=1)
        assert [chunk["status"] for chunk in chunks] == ["cancelled"]
        assert result["status"] == "cancelled"
        with pytest.raises(AssertionError):
            await collect("--url", redis_url, "--stream", "no-such-job")


SUBMITS = """
import { pathToFileURL } from "node:url";
const [url, queue, request, file] = process.argv.slice(1); // the first file would be run
const { Producer } = await import(pathToFileURL(file).href);
const producer = new Producer(url, queue);
console.log(await producer.submit(JSON.parse(request)));
producer.close();
"""


async def test_options_of_a_request_take_effect(redis_url: str) -> None:
    """The fields that the script is given apart from the request itself."""
    late, later = 4_000_000_000_000, 4_100_000_000_000
    wanted = {"priority": "bulk", "tenant": "acme", "not_before_ms": late, "deadline_ms": later}
    request = json.dumps({"prompt": "Hello", "params": {"max_tokens": 4}, **wanted})
    try:
        program = [node(), "--input-type=module", "-e", SUBMITS]
    except NodeUnavailable as error:
        missing(str(error))
    command = [*program, redis_url, QUEUE, request, str(EXAMPLES / "producer.mjs")]
    said = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 0, said.stderr
    async with client_of(redis_url) as client:
        info = await client.status(said.stdout.strip())
        assert info.status == "scheduled"
        assert {name: getattr(info, name) for name in wanted} == wanted
        assert await client.cancel(info.job_id) == "cancelled"


async def test_a_missing_queue_name_is_refused_before_submitting(redis_url: str) -> None:
    try:
        command = [node(), str(EXAMPLES / "producer.mjs"), "--url", redis_url, "Hello"]
    except NodeUnavailable as error:
        missing(str(error))
    said = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60
    )
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.startswith("producer: name the queue")


def test_the_javascript_producer_s_script_is_the_client_s() -> None:
    """The text is the helpers, one line feed and the script; any other has another SHA-1."""
    text = "\n".join(
        (EXAMPLES.parents[1] / "api_client" / "tokenmill" / "lua" / f"{name}.lua").read_text()
        for name in ("common", "submit")
    )
    assert text == SUBMIT.text
