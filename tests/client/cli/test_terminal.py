"""A terminal receives no control character of a job; a pipe receives answers as they are."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest
import redis

from tokenmill import Client
from tokenmill.transport.scripts import SUBMIT
from tokenmill_schemas.codec import encode
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import ChoiceResult, JobError, JobResult, JobStatus

pytestmark = pytest.mark.redis

HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31mred\x7f\r"
SHOWN = rb"\x1b]0;title\x07\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31mred\x7f\r"
STYLE = re.compile(rb"\x1b\[[0-9;]*m")  # of our own; HOSTILE has none of this form
KEYS = Keys("q")


@pytest.fixture
def environment(redis_url: str, database: str, allowed_keys: list[str]) -> dict[str, str]:
    allowed_keys.append("tm:{q}:*")
    where = {"TOKENMILL_REDIS_URL": redis_url, "TOKENMILL_DATABASE_URL": database}
    return {
        **os.environ,  # noqa: TID251 - a command of its own process
        **where,
        "TOKENMILL_QUEUE": "q",
        "TERM": "xterm-256color",
        "COLUMNS": "400",
    }


EACH = """
import json, sys
from tokenmill.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit:
        pass
    print("<end>", flush=True)
"""


def on_a_terminal(environment: Mapping[str, str], *commands: list[str]) -> list[bytes]:
    """Return what a terminal receives from stdout and stderr of each command, all in one process,
    whose start takes longer than the commands.
    """
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", EACH, json.dumps(commands)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
    ) as process:  # fmt: skip
        os.close(theirs)
        received = b""
        try:
            while data := os.read(ours, 65_536):
                received += data
        except OSError:  # the terminal's other end is closed
            pass
        process.wait(60)
    os.close(ours)
    *each, rest = received.split(b"<end>\r\n")
    assert (len(each), rest) == (len(commands), b"")
    return each


def controls(received: bytes) -> bytes:
    """Return the control characters that are neither line ends nor styles."""
    text = STYLE.sub(b"", received.replace(b"\r\n", b"")).decode()
    return "".join(x for x in text if x < " " or "\x7f" <= x <= "\x9f").encode()


def ended(url: str, client: Client, **fields: object) -> str:
    """Store a job with an ended result, as a worker records it."""
    job = str(client.submit(prompt="x"))
    result = JobResult(job_id=job, **{"status": JobStatus.SUCCEEDED, **fields})  # type: ignore[arg-type]
    with redis.Redis.from_url(url) as server:
        values: dict[str | bytes, str | bytes] = {
            "state": str(result.status), "result": encode(result), "settled": "1"
        }  # fmt: skip
        server.hset(KEYS.job(job), mapping=values)
    return job


def submit_hostile(url: str) -> str:
    """Submit a job whose tenant is hostile, past the checks of our clients."""
    job_id = "id"
    request = JobRequest(job_id=job_id, prompt="x", tenant=HOSTILE)
    with redis.Redis.from_url(url) as server:
        server.eval(
            SUBMIT.text, 1, KEYS.meta, KEYS.base, "PUBLISH", 0, 0, job_id, "standard", HOSTILE,
            "f", "", encode(request), 1, 0, 0, 1, "",
        )  # fmt: skip
    return job_id


def test_an_answer_s_control_characters_are_shown_on_a_terminal(
    environment: dict[str, str], client: Client, redis_url: str
) -> None:
    answer = ChoiceResult(text=f"a{HOSTILE}b\n\tc", reasoning=f"t{HOSTILE}")
    job = ended(redis_url, client, choices=(answer,))
    *texts, whole = on_a_terminal(
        environment, ["result", job], ["tail", job], ["result", job, "--json"]
    )
    for received in texts:
        assert controls(received) == b"\t"
        assert b"a" + SHOWN + b"b\r\n\tc" in received
        assert b"t" + SHOWN in received
    assert controls(whole) == b""
    assert json.loads(whole)["choices"][0]["text"] == answer.text


def test_names_and_errors_are_shown_on_a_terminal(
    environment: dict[str, str], client: Client, redis_url: str
) -> None:
    job_id = submit_hostile(redis_url)
    error = JobError("invalid_request", HOSTILE)
    failed = ended(redis_url, client, status=JobStatus.FAILED, error=error)
    commands = [
        ["jobs"], ["top", "--once"], ["status", job_id], ["status", failed], ["result", failed],
        ["cancel", f"no{HOSTILE}"], ["status", f"no{HOSTILE}"],
    ]  # fmt: skip
    for command, received in zip(commands, on_a_terminal(environment, *commands), strict=True):
        assert received, command
        assert controls(received) == b"", command
        assert b"\\x1b" in received, command


def test_a_pipe_receives_an_answer_unchanged(
    environment: dict[str, str], client: Client, redis_url: str
) -> None:
    answer = ChoiceResult(text=f"a{HOSTILE}é")
    job = ended(redis_url, client, choices=(answer,))
    command = [sys.executable, "-m", "tokenmill.cli", "result", job]
    piped = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert piped.stdout == f"{answer.text}\n".encode()


def test_an_ascii_stdout_receives_escapes_for_other_characters(
    environment: dict[str, str], client: Client, redis_url: str
) -> None:
    job = ended(redis_url, client, choices=(ChoiceResult(text="café 🦊"),))
    environment["PYTHONIOENCODING"] = "ascii"
    command = [sys.executable, "-m", "tokenmill.cli", "result", job]
    piped = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert piped.stdout == b"caf\\xe9 \\U0001f98a\n"
    command.append("--json")
    piped = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert json.loads(piped.stdout)["choices"][0]["text"] == "café 🦊"
