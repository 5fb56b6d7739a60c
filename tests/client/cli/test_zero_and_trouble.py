"""A zero on the command line is a value, and a server that goes away under a stream is spoken of
at once.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import typer
from typer.testing import CliRunner

from tokenmill import AsyncClient, Client
from tokenmill.cli import app
from tokenmill.cli.views.job_output import follow
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import decode_request

pytestmark = pytest.mark.redis


def where(url: str) -> dict[str, str]:
    return {"TOKENMILL_REDIS_URL": url, "TOKENMILL_QUEUE": "q", "COLUMNS": "200"}


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--max-tokens", "max_tokens must be from 1"),
        ("--n", "n must be from 1"),
        ("--repetition-penalty", "repetition_penalty must be from 0.000001"),
    ],
)
def test_a_zero_outside_an_option_s_range_is_refused(redis_url, option, says):
    done = CliRunner().invoke(app, ["submit", "hi", option, "0"], env=where(redis_url))
    assert done.exit_code == 1
    assert says in done.stderr


async def test_a_zero_within_an_option_s_range_is_passed_on(redis_url, allowed_keys):
    allowed_keys.append("tm:{q}:*")  # no worker runs
    zeros = [
        "--temperature",
        "0",
        "--seed",
        "0",
        "--top-k",
        "0",
        "--min-p",
        "0",
        "--logprobs",
        "0",
        "--stop-token-ids",
        "0",
    ]
    done = await asyncio.to_thread(
        CliRunner().invoke, app, ["submit", "hi", *zeros], env=where(redis_url)
    )
    assert done.exit_code == 0, done.stderr
    async with AsyncClient(redis_url, queue="q") as client:
        payload = await client._redis.hget(client.keys.job(done.stdout.strip()), "request")
    params = decode_request(payload).params
    assert (params.temperature, params.seed, params.logprobs, params.stop_token_ids) == (
        0.0,
        0,
        0,
        (0,),
    )
    assert params.logprobs is not False


async def listens(client: AsyncClient, job_id: str) -> bool:
    channel = client.keys.chunks(job_id)
    return bool(dict(await client._redis.pubsub_numsub(channel))[channel.encode()])


async def test_a_stream_prints_a_warning_as_soon_as_its_server_is_unreachable(
    make_valkey, tmp_path: Path
):
    server = make_valkey()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenmill.cli", "submit", "hi", "--stream", "--redis-url",
        server.url, "--queue", "q",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    async with AsyncClient(server.url, queue="q") as client, asyncio.timeout(60):
        while not (jobs := await client.list()) or not await listens(client, jobs[0].job_id):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # it has read the log too, and waits
    server.kill()
    async with asyncio.timeout(60):
        said = [(await process.stderr.readline()).decode() for _ in range(2)]
    assert "no worker has ever served the queue 'q'" in said[0]
    assert said[1].startswith("Note: ")
    assert "waiting up to 120 s" in said[1]
    process.kill()
    await process.wait()


def test_an_unreachable_server_ends_the_command_with_a_sentence_and_a_hint():
    done = CliRunner().invoke(app, ["submit", "hi", "--stream"], env=where("redis://127.0.0.1:1/0"))
    assert done.exit_code == 1
    assert "Error: " in done.stderr
    assert "TOKENMILL_REDIS_URL" in done.stderr
    assert "waiting" not in done.stderr


def test_a_wrong_password_has_the_hint_about_passwords_not_about_addresses(redis_url: str) -> None:
    url = redis_url.replace("redis://", "redis://nobody:wrong@")
    done = CliRunner().invoke(app, ["status", "x"], env=where(url))
    error, hint = done.stderr.splitlines()
    assert (done.exit_code, "invalid username-password pair" in error) == (1, True)
    assert (
        hint == "Hint: the URL has them: redis://user:password@host:6379/0 "
        "(--redis-url, TOKENMILL_REDIS_URL)"
    )


def test_bench_is_an_unknown_command() -> None:
    done = CliRunner().invoke(app, ["bench"], env={"COLUMNS": "200"})
    assert (done.exit_code, "No such command 'bench'" in done.stderr) == (2, True)


def test_an_interrupted_stream_prints_its_notice_on_a_new_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Interrupted:
        def stream(self, job_id: str, **_: object) -> Iterator[Chunk]:
            yield Chunk(job_id=job_id, attempt=1, index=0, text="The sky is")
            raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        follow(cast("Client", Interrupted()), "j")
    printed = capsys.readouterr()
    assert (ended.value.exit_code, printed.out) == (130, "The sky is")
    assert printed.err.startswith("\nNote: interrupted; the job goes on: tokenmill tail j")
