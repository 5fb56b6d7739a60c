"""The producers in Java and Go submit, read and resume as the Python client does.

Java 17 must be on the machine. `ops/setup dev` installs Go, whose first build takes half a minute.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import EXAMPLES, ROOT
from tests.support.lifecycle import missing
from tests.support.two_choices import read_two_choices
from tests.support.waiting import until
from tests.support.worker import QUEUE, client_of, running_worker
from tokenmill_schemas import Chunk, FinishReason, JobStatus
from tokenmill_schemas.codec import encode
from tokenmill_schemas.keys import Keys

pytestmark = [
    pytest.mark.redis,
    pytest.mark.timeout(300),
]

SLOW = "synthetic?step_ms=5&mean_tokens=1000000000000"


def compiled_java(folder: Path) -> list[str]:
    """Compile the example in Java 17; a warning of the compiler is an error."""
    if shutil.which("javac") is None:
        pytest.skip("no Java compiler on this machine")
    source = str(EXAMPLES / "Producer.java")
    subprocess.run(["javac", "-Xlint:all", "-Werror", "-d", str(folder), source], check=True)
    return ["java", "-XX:TieredStopAtLevel=1", "-cp", str(folder), "Producer"]


def compiled_go(folder: Path) -> list[str]:
    """Compile the example in Go; an objection of vet is an error."""
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # noqa: TID251
    go = shutil.which("go", path=path)
    if go is None:
        missing("Go is missing: run ops/setup dev")
    sources = sorted(map(str, (EXAMPLES / "go").glob("*.go")))
    local = {"GOTOOLCHAIN": "local", "GOCACHE": str(ROOT / ".cache" / "go-build")}
    for command in (["vet"], ["build", "-o", str(folder / "producer")]):
        subprocess.run([go, *command, *sources], check=True, env=os.environ | local)  # noqa: TID251
    return [str(folder / "producer")]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(compiled_java, id="java"),
        pytest.param(compiled_go, id="go", marks=pytest.mark.slow),
    ],
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command that runs a compiled example."""
    compiled: list[str] = request.param(tmp_path_factory.mktemp("compiled"))
    return compiled


def log_reads(server: Any) -> int:
    return int(server.info("commandstats").get("cmdstat_xrange", {}).get("calls", 0))


async def run(program: list[str], *arguments: str) -> tuple[int, str, list[str]]:
    """Return the exit status, the printed text, and the lines of the standard error."""
    done = await asyncio.to_thread(
        subprocess.run,
        [*program, *arguments],
        cwd=ROOT,  # where the scripts are
        capture_output=True,
        timeout=60,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode().splitlines()


async def test_each_producer_submits_a_job_and_streams_the_result_s_text(
    redis_url: str, database: str, program: list[str]
) -> None:
    async with running_worker(redis_url, database, model=SLOW), client_of(redis_url) as client:
        status, text, lines = await run(program, redis_url, QUEUE, "Grüße, 🌍")
        job = lines[0].removeprefix("job ")
        result = await client.result(job, timeout=30)
        assert (status, lines[1:]) == (0, ["succeeded"])
        assert text == result.text + "\n"
        assert result.usage.completion_tokens == 64
        late = await run(program, redis_url, QUEUE, "--read", job)
    assert late == (status, text, lines)


@pytest.mark.slow
async def test_each_producer_streams_several_choices_over_a_cut_subscription(
    redis_url: str, database: str, program: list[str], valkey: Any
) -> None:
    """The server cuts the subscription several times; each token of each choice comes once."""
    async with running_worker(redis_url, database, model=SLOW), client_of(redis_url) as client:
        job = await client.submit(prompt="🌍 Go", max_tokens=300, n=2, ignore_eos=True)
        reading = asyncio.create_task(run(program, redis_url, QUEUE, "--read", job))
        cuts = 0
        with valkey.client() as control:
            while not reading.done():
                await asyncio.sleep(0.4)
                cuts += control.client_kill_filter(_type="pubsub")
        result = await client.result(job, timeout=30)
    first, second = (choice.text for choice in result.choices)
    assert cuts >= 1, "nothing was cut"
    assert await reading == (0, f"{first}\n[1] {second}\n", [f"job {job}", "succeeded"])


async def test_each_producer_skips_received_tokens_and_reads_missing_ones(
    redis_url: str, program: list[str], valkey: Any, allowed_keys: list[str]
) -> None:
    """A chunk begins with tokens that it has; another begins behind a chunk that was not published.

    `text_ends` counts code points: an emoji is two units of Java's strings and four bytes of Go's.
    """
    allowed_keys.append("tm:{q}:*")
    job, keys = "by-hand", Keys(QUEUE)
    parts = [
        Chunk(job_id=job, index=0, token_ids=(1, 2), text="🌍a", text_ends=(1, 2)),
        Chunk(job_id=job, index=0, token_ids=(1, 2, 3), text="🌍a🎉", text_ends=(1, 2, 3)),
        Chunk(job_id=job, index=3, token_ids=(4,), text="b"),
        Chunk(job_id=job, index=4, token_ids=(5,), text="c"),
        Chunk(
            job_id=job,
            index=5,
            text="d",
            finish_reason=FinishReason.STOP,
            status=JobStatus.SUCCEEDED,
        ),
    ]
    first, overlap, unpublished, after, last = map(encode, parts)
    with valkey.client() as server:
        server.hset(keys.job(job), "state", "running")
        server.xadd(keys.log(job), {"chunk": first}, "2-0")
        channel, reads = keys.chunks(job), log_reads(server)
        reading = asyncio.create_task(run(program, redis_url, QUEUE, "--read", job))
        await until(lambda: log_reads(server) > reads)  # it subscribes before it reads the log
        server.publish(channel, overlap)
        for number, chunk in ((3, overlap), (4, unpublished), (5, after)):
            server.xadd(keys.log(job), {"chunk": chunk}, f"{number}-0")
        reads = log_reads(server)

        def has_read_again() -> bool:
            """The program has no silence after which it would read the log anyway."""
            server.publish(channel, after)
            return log_reads(server) > reads

        await until(has_read_again)
        server.publish(channel, last)
        assert await reading == (0, "🌍a🎉bcd\n", [f"job {job}", "succeeded"])


@pytest.mark.parametrize("from_result", [False, True])
async def test_each_producer_prints_text_behind_a_choice_s_last_token_once(
    redis_url: str, program: list[str], valkey: Any, allowed_keys: list[str], from_result: bool
) -> None:
    allowed_keys.append("tm:{q}:*")

    async def read(job: str) -> tuple[int, str, list[str]]:
        return await run(program, redis_url, QUEUE, "--read", job)

    with valkey.client() as server:
        done = await read_two_choices(server, Keys(QUEUE), "two", read, from_result=from_result)
    assert done == (0, "a!\n[1] b?\n", ["job two", "succeeded"])


async def test_a_refusal_and_an_unknown_job_are_printed(
    redis_url: str, database: str, program: list[str]
) -> None:
    async with client_of(redis_url) as client:
        await client.set_queue_limit(1)
        job = await client.submit(prompt="Never")
        status, _, lines = await run(program, redis_url, QUEUE, "One too many")
        assert status == 1
        assert "refused: full 1 1" in lines[0]
        await client.cancel(job)
        assert await run(program, redis_url, QUEUE, "--read", job) == (
            1,
            "\n",
            [f"job {job}", "cancelled"],
        )
        status, _, lines = await run(program, redis_url, QUEUE, "--read", "none")
        assert status == 1
        assert "unknown job" in lines[1]
