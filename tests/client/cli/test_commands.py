"""Runs the commands on a real queue without a worker, and on a database with known rows."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import cast

import pytest
from typer.testing import Result

from tests.client.cli.support import Shell
from tests.support.valkey import ControlledValkey
from tokenmill import Client
from tokenmill.errors import ConfigurationError
from tokenmill_schemas.codec import decode_request
from tokenmill_schemas.keys import Keys

pytestmark = pytest.mark.redis


def test_submit_prints_an_id_and_nothing_else(shell: Shell, client: Client) -> None:
    done = shell("submit", "Hello", "-n", "5", "--tenant", "acme", "--priority", "bulk")
    assert done.exit_code == 0
    info = client.status(done.stdout.strip())
    assert (info.status, info.tenant, info.priority) == ("queued", "acme", "bulk")
    again = [shell("submit", "Hello", "--idempotency-key", "k").stdout for _ in range(2)]
    assert again[0] == again[1]


def test_help_distinguishes_the_two_short_options_n(shell: Shell) -> None:
    words = " ".join(shell("submit", "--help").stdout.replace("│", " ").split())
    assert "Largest number of tokens (`--n` counts answers)." in words
    assert "Answers to the same prompt (`-n` is --max-tokens)." in words


def test_an_absurd_deadline_is_refused_in_a_short_sentence(shell: Shell) -> None:
    done = shell("submit", "Hello", "--deadline", "1e300")
    assert (done.exit_code, done.stderr) == (1, "Error: deadline is no time: 1e+300\n")


def test_an_invalid_queue_name_is_refused_by_every_command(shell: Shell) -> None:
    for command in (
        ("jobs",),
        ("usage", "--one-queue"),
        ("top", "--once"),
        ("dead", "list"),
        ("bulk", "list"),
    ):
        done = shell(*command, "--queue", "bad name")
        assert done.exit_code == 1, command
        assert done.stderr.startswith(
            "Error: a queue's name must not be empty, nor contain braces"
        ), command


def test_without_a_database_the_whole_path_is_printed_and_batches_are_refused(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is relative: in another folder there is none."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    default = {"TOKENMILL_DATABASE_URL": ""}
    done = shell("jobs", environment=default)
    assert f"there is no database at {folder}/tokenmill.db" in done.stderr
    done = shell("bulk", "list", environment=default)
    assert done.exit_code == 1
    assert "Error: batches are kept in a database: name it with --database-url" in done.stderr
    assert list(folder.iterdir()) == []
    done = shell("db", "upgrade", environment=default)
    assert done.stdout.startswith(f"{folder}/tokenmill.db: new → ")
    assert shell("bulk", "list", environment=default).exit_code == 0


def test_a_wrong_password_is_reported_as_a_wrong_setting(shell: Shell) -> None:
    wrong = shell.redis_url.replace("redis://", "redis://nobody:wrong@")
    done = shell("submit", "Hello", "--redis-url", wrong)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: Redis refuses this user: invalid username-password pair")
    assert "redis://user:password@host:6379/0" in done.stderr
    with (
        Client(wrong, queue="q") as client,
        pytest.raises(ConfigurationError, match="refuses this user"),
    ):
        list(client.stream("any"))


@pytest.mark.parametrize(
    ("missing", "is_silent"), [("pydantic_settings", True), ("tokenmill_worker.cli", False)]
)
def test_worker_commands_are_left_out_silently_if_their_packages_are_missing(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, missing: str, is_silent: bool
) -> None:
    """A missing package of our own is a broken installation, which is reported."""

    def load(_entry: EntryPoint) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(EntryPoint, "load", load)
    done = shell("--help")
    assert ("Warning" not in done.stderr) is is_silent
    done = shell("worker")
    assert done.exit_code == 1
    assert (
        "`tokenmill worker` needs the worker: pip install '.[worker,engine]' in tokenmill's folder"
        in done.stderr
    )
    done = shell("keys")
    words = "`tokenmill keys` needs the gateway: pip install '.[gateway]' in tokenmill's folder"
    assert (done.exit_code, words in done.stderr) == (1, True)


def test_an_unknown_job_does_not_stop_the_cancel_of_the_others(
    shell: Shell, client: Client
) -> None:
    first, second, third, fourth = (str(client.submit(prompt="x")) for _ in range(4))
    done = shell("cancel", first, "nope", second)
    assert (done.exit_code, done.stdout) == (1, f"{first} cancelled\n{second} cancelled\n")
    assert "no job nope" in done.stderr
    done = shell("cancel", third, "nope", fourth, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {third: "cancelled", "nope": "unknown", fourth: "cancelled"}


@pytest.mark.parametrize(
    "command",
    ["jobs", "webhooks list", "webhooks redrive --all", "dead list", "dead redrive --all"],
)
def test_numbers_beyond_the_database_s_range_are_refused(shell: Shell, command: str) -> None:
    done = shell(*command.split(), "--limit", "99999999999999999999")
    assert done.exit_code == 2
    assert "1000000000" in done.stderr


@pytest.mark.parametrize("command", [("status", "\udcff"), ("usage", "--tenant", "\udcff")])
def test_an_argument_that_is_not_unicode_is_refused(shell: Shell, command: tuple[str, ...]) -> None:
    done = shell(*command)
    assert done.stderr == "Error: a name or id holds '\\udcff', which is no Unicode character\n"


def test_the_prompt_may_come_from_stdin_a_file_or_json(shell: Shell, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text('[{"role": "user", "content": "Hi"}]')
    for arguments, stdin in (
        (("submit",), "from a pipe\n"),
        (("submit", "--messages", f"@{chat}"), None),
        (("submit", "--prompt-ids", "1, 2,3"), None),
        (("submit", "Hi", "--system", "Be brief"), None),
    ):
        done = shell(*arguments, "--json", stdin=stdin)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["queue"] == "q"


def test_a_model_beside_a_queue_is_the_requested_model(
    shell: Shell, valkey: ControlledValkey
) -> None:
    def model_of(done: Result) -> str:
        with valkey.client() as redis:
            raw = cast("bytes", redis.hget(Keys("q").job(done.stdout.strip()), "request"))
        return decode_request(raw).model

    assert model_of(shell("submit", "x", "--model", "poet")) == "poet"
    assert model_of(shell("submit", "x")) == ""
    assert model_of(shell("submit", "x", environment={"TOKENMILL_MODEL": "/models/base"})) == "", (
        "it is the worker's"
    )


def test_a_model_alone_names_the_queue(shell: Shell, allowed_keys: list[str]) -> None:
    allowed_keys.append("tm:{base}:*")
    done = shell(
        "submit", "x", "--model", "/models/Base", "--json", environment={"TOKENMILL_QUEUE": ""}
    )
    assert json.loads(done.stdout)["queue"] == "base"


def test_a_wait_without_workers_prints_a_note(shell: Shell) -> None:
    done = shell("submit", "x", "--wait", "--timeout", "0.1")
    assert "no worker has ever served the queue 'q'" in done.stderr
    assert done.exit_code == 1
    assert "no worker has ever served the queue 'q'" in shell("submit", "x").stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("submit", "x", "--temperature", "-1", "--top-p", "7"), "top_p"),
        (("submit", "x", "--messages", "[]"), "give one of"),
        (("submit", "--messages", "{"), "--messages is not JSON"),
        (("submit", "--messages", "@/no/such/file"), "cannot read /no/such/file"),
        (("submit", "--prompt-ids", "1,a"), "whole numbers"),
        (("submit", "x", "--metadata", "novalue"), "KEY=VALUE"),
        (("submit", "x", "--redis-url", "redis://127.0.0.1:1/0"), "TOKENMILL_REDIS_URL"),
        (("submit", "x", "--redis-url", "gopher://x"), "gopher"),
        (("status", "nope"), "no job nope"),
        (
            ("jobs", "--status", "succeeded", "--database-url", "sqlite:////no/such.db"),
            "no database at",
        ),
        (("usage", "--since", "yesterday"), "YYYY-MM-DD"),
        (("usage", "--until", "2026-02-30"), "not '2026-02-30'"),
        (("usage", "--by", "mood"), "grouped by mood"),
        (("dead", "redrive"), "--all"),
        (("dead", "redrive", "nope"), "nope is not a dead job"),
    ],
)
def test_an_error_is_one_sentence_and_a_status(
    shell: Shell, arguments: tuple[str, ...], says: str
) -> None:
    done = shell(*arguments)
    assert done.exit_code == 1
    assert says in done.output
    assert "Traceback" not in done.output
    assert isinstance(done.exception, SystemExit)


def test_status_and_cancel_print_a_job_s_state(shell: Shell) -> None:
    job = shell("submit", "Hello").stdout.strip()
    assert "queued" in shell("status", job).stdout
    assert shell("cancel", job).stdout == f"{job} cancelled\n"
    assert json.loads(shell("status", job, "--json").stdout)["status"] == "cancelled"
    assert shell("cancel", job, "--json").stdout.split() == ["{", f'"{job}":', '"cancelled"', "}"]


def test_result_prints_an_answer_that_only_sql_has(shell: Shell) -> None:
    done = shell("result", "good")
    assert (done.exit_code, done.stdout) == (0, "Blue light scatters. ☁\n")
    assert json.loads(shell("result", "good", "--json").stdout)["usage"]["completion_tokens"] == 3
    done = shell("result", "bad")
    assert done.exit_code == 1
    assert "the prompt is too long" in done.stderr


def test_jobs_lists_open_jobs_before_ended_jobs(shell: Shell) -> None:
    job = shell("submit", "Hello").stdout.strip()
    assert json.loads(shell("jobs", "--json").stdout)[0]["job_id"] == job
    assert {row["job_id"] for row in json.loads(shell("jobs", "--json").stdout)} == {
        job,
        "good",
        "bad",
    }
    assert [
        row["job_id"] for row in json.loads(shell("jobs", "--status", "failed", "--json").stdout)
    ] == ["bad"]
    assert [
        row["job_id"] for row in json.loads(shell("jobs", "--status", "open", "--json").stdout)
    ] == [job]
    text = shell("jobs").stdout
    assert job in text
    assert "the prompt is too long" in text


def test_jobs_lists_the_database_with_a_warning_if_redis_is_unreachable(shell: Shell) -> None:
    done = shell("jobs", "--json", "--redis-url", "redis://127.0.0.1:1/0")
    assert done.exit_code == 0
    assert {row["job_id"] for row in json.loads(done.stdout)} == {"good", "bad"}
    assert "Warning" in done.stderr


def test_usage_prints_sums_by_tenant(shell: Shell) -> None:
    rows = json.loads(shell("usage", "--by", "tenant", "--json").stdout)
    assert [
        (row["tenant"], row["jobs"], row["succeeded"], row["completion_tokens"]) for row in rows
    ] == [("acme", 2, 1, 3)]
    assert "acme" in shell("usage").stdout


def test_dead_commands_on_an_empty_dead_letter_stream_print_empty_lists(shell: Shell) -> None:
    assert json.loads(shell("dead", "list", "--json").stdout) == []
    assert json.loads(shell("dead", "redrive", "--all", "--json").stdout) == {
        "redriven": [],
        "not_dead": [],
    }


def test_top_without_a_terminal_prints_one_view(shell: Shell) -> None:
    shell("submit", "Hello")
    assert "NO WORKER IS ALIVE" in shell("top").stdout
    assert json.loads(shell("top", "--json").stdout)["queued"]["standard"] == 1
    (answer,) = json.loads(shell("scale", "--json").stdout)
    assert (answer["queue"], answer["workers"], answer["now"]) == ("q", 1, 0)
    shown = shell("scale", "q", "other").stdout.splitlines()
    assert [line.split()[:3] for line in shown] == [
        ["queue", "needed", "there"], ["q", "1", "0"], ["other", "0", "0"]
    ]  # fmt: skip
    assert shown[2].endswith("nothing waits and nothing runs")


@pytest.mark.parametrize(
    ("command", "ends"),
    [
        (("cancel",), " {JOB}..."),
        (("dead", "redrive"), " [JOB]..."),
        (("webhooks", "redrive"), " [WEBHOOK]..."),
        (("top",), " [QUEUE]..."),
    ],
)
def test_a_repeatable_argument_has_dots_once_in_its_usage(
    shell: Shell, command: tuple[str, ...], ends: str
) -> None:
    usage = next(line for line in shell(*command, "--help").stdout.splitlines() if "Usage" in line)
    assert usage.rstrip().endswith(f"[OPTIONS]{ends}")


@pytest.mark.parametrize("option", ["--messages", "--grammar", "--json-schema", "--logit-bias"])
def test_an_endless_file_is_refused(shell: Shell, option: str) -> None:
    done = shell("submit", *(() if option == "--messages" else ("hi",)), option, "@/dev/zero")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"Error: {option}: /dev/zero has more than 8388608 characters\n"


def test_an_endless_prompt_from_stdin_is_refused(shell: Shell) -> None:
    done = shell("submit", stdin="x" * 8_388_609)
    assert (done.exit_code, done.stderr) == (
        1,
        "Error: the prompt has more than 8388608 characters\n",
    )


@pytest.mark.parametrize("command", [("submit", "hi", "--wait"), ("tail", "x"), ("result", "x")])
@pytest.mark.parametrize("timeout", ["-1", "nan"])
def test_an_invalid_wait_is_refused(shell: Shell, command: tuple[str, ...], timeout: str) -> None:
    done = shell(*command, f"--timeout={timeout}")
    assert (done.exit_code, done.stdout, "greater than or equal to 0" in done.stderr) == (
        2,
        "",
        True,
    )


@pytest.mark.parametrize(
    "command",
    [
        (),
        *[
            (name,)
            for name in ("submit", "tail", "status", "result", "cancel", "jobs", "usage", "top")
        ],
    ],
)
def test_every_command_has_a_help_text(shell: Shell, command: tuple[str, ...]) -> None:
    done = shell(*command, "--help")
    assert done.exit_code == 0
    assert "Usage" in done.stdout
