"""The commands that read SQL alone, as a user types them: pages, moments, CSV, webhooks."""

import csv
import io
import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from tests.record.support import failed, finished
from tests.support.databases import migrated_sqlite
from tests.tasks.support import SECRET, record, with_webhook
from tokenmill.cli import app
from tokenmill.sql.engine import open_engine
from tokenmill.webhooks import tenant_secret
from tokenmill_worker.tasks.usage_rollup import RollUp

DAY_MS = 86_400_000


@pytest.fixture
def database(tmp_path: Path) -> str:
    return migrated_sqlite(tmp_path / "t.db")


def run(database: str, *arguments: str, **variables: str) -> Result:
    where = {
        "TOKENMILL_DATABASE_URL": database,
        "TOKENMILL_QUEUE": "q",
        "COLUMNS": "200",
        **variables,
    }
    return CliRunner().invoke(app, list(arguments), env=where)


def test_pages_follow_one_another_to_the_end(database: str) -> None:
    """Jobs of one millisecond stand on both sides of a page's end; new jobs shift no page."""
    record(database, *(finished(f"j{n:02}", finished_ms=1000 + n // 3) for n in range(10)))
    seen: list[str] = []
    arguments: list[str] = []
    for _ in range(4):
        answer = run(database, "jobs", "--state", "ended", "--limit", "3", "--json", *arguments)
        page = json.loads(answer.stdout)
        seen += [job["job_id"] for job in page]
        record(database, finished(f"new{len(seen)}", finished_ms=5000))
        words = answer.stderr.split("--after ")
        arguments = ["--after", words[1].strip()] if len(words) > 1 else []
    assert seen == [f"j{n:02}" for n in reversed(range(10))]
    assert arguments == []


@pytest.mark.parametrize("cursor", ["", "x", "12", "x.y", "-1.a", "1."])
def test_an_invalid_cursor_is_refused(database: str, cursor: str) -> None:
    answer = run(database, "jobs", "--after", cursor)
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert "is no cursor" in answer.stderr


def test_jobs_are_filtered_by_time_and_model(database: str) -> None:
    record(
        database,
        finished("old", finished_ms=1),
        finished("new", finished_ms=DAY_MS * 20_000, model="big"),
        finished("other", finished_ms=DAY_MS * 20_001),
    )

    def ids(*arguments: str) -> list[str]:
        return [
            job["job_id"] for job in json.loads(run(database, "jobs", "--json", *arguments).stdout)
        ]

    assert ids("--since", "2024-10-04T00:00:00+00:00") == ["other", "new"]
    assert ids("--since", "2024-10-04T00:00:00+00:00", "--until", "2024-10-05T00:00:00+00:00") == [
        "new"
    ]
    assert ids("--only-model", "big") == ["new"]
    assert ids("--since", "1h") == []
    assert "a time is written" in run(database, "jobs", "--since", "yesterday").stderr


def test_usage_as_csv_with_and_without_sums(database: str) -> None:
    day = 20_000 * DAY_MS
    record(
        database,
        *(finished(f"a{n}", finished_ms=day + n * DAY_MS, tenant='ac"me, Inc') for n in range(5)),
        failed("bad", finished_ms=day),
    )
    command = ("usage", "--by", "tenant,day", "--csv", "--until", "2024-10-06")
    before = run(database, *command).stdout
    names, *lines = csv.reader(io.StringIO(before))
    assert names[:4] == ["tenant", "day", "jobs", "succeeded"]
    assert [line[:4] for line in lines] == [
        ['ac"me, Inc', "2024-10-04", "1", "1"],
        ['ac"me, Inc', "2024-10-05", "1", "1"],
        ['ac"me, Inc', "2024-10-06", "1", "1"],
        ["acme", "2024-10-04", "1", "0"],
    ]
    engine = open_engine(database)
    RollUp(engine).recent()
    assert run(database, *command).stdout == before
    with engine.begin() as connection:  # what was summed up is read from the sums
        connection.execute(sa.text("DELETE FROM usage WHERE day < '2024-10-06'"))
    assert run(database, *command).stdout == before
    engine.dispose()


def test_usage_includes_jobs_since_the_last_roll_up(database: str) -> None:
    import time

    now_ms = round(time.time() * 1000)
    engine = open_engine(database)
    record(
        database,
        finished("a", finished_ms=now_ms - 9 * DAY_MS),
        finished("b", finished_ms=now_ms - DAY_MS),
    )
    RollUp(engine).recent()
    record(database, finished("c", finished_ms=now_ms), finished("d", finished_ms=now_ms - DAY_MS))
    engine.dispose()
    assert json.loads(run(database, "usage", "--by", "tenant", "--json").stdout)[0]["jobs"] == 4


def test_json_and_csv_together_are_refused(database: str) -> None:
    answer = run(database, "usage", "--json", "--csv")
    assert answer.exit_code == 1
    assert "not both" in answer.stderr


def test_webhooks_are_listed_and_redriven(database: str) -> None:
    record(
        database,
        *(
            with_webhook(name, "https://hooks.example/x", finished_ms=n + 1)
            for n, name in enumerate("abc")
        ),
    )
    engine = open_engine(database)
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "UPDATE webhooks SET state = 'dead', attempts = 10, last_error = 'gone' "
                "WHERE job_id != 'c'"
            )
        )
    engine.dispose()
    listed = run(database, "webhooks", "list", "--state", "dead")
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == ["msg_b_2", "msg_a_1"]
    assert "gone" in listed.stdout
    answer = run(database, "webhooks", "redrive", "msg_a_1", "msg_c_3")
    assert answer.exit_code == 1
    assert answer.stdout == "msg_a_1 redriven\nmsg_c_3 is not a dead webhook\n"
    (again,) = json.loads(run(database, "webhooks", "list", "--job", "a", "--json").stdout)
    assert (again["state"], again["attempts"]) == ("pending", 0)
    assert json.loads(run(database, "webhooks", "redrive", "--all", "--json").stdout)[
        "redriven"
    ] == ["msg_b_2"]
    assert "no dead webhooks" in run(database, "webhooks", "redrive", "--all").stderr
    assert (
        "a webhook is pending, sending"
        in run(database, "webhooks", "list", "--state", "lost").stderr
    )


def test_webhook_secrets_are_made_and_derived_per_tenant(database: str) -> None:
    fresh = run(database, "webhooks", "secret", "--new").stdout.strip()
    derived = run(
        database, "webhooks", "secret", "--tenant", "acme", TOKENMILL_WEBHOOK_SECRET=fresh
    ).stdout.strip()
    assert derived == tenant_secret(fresh, "acme") != tenant_secret(SECRET, "acme")
    assert "TOKENMILL_WEBHOOK_SECRET" in run(database, "webhooks", "secret").stderr


def test_a_downgrade_is_confirmed_and_prints_what_it_did(database: str) -> None:
    refused = run(database, "db", "downgrade", "base")
    assert (refused.exit_code, "--yes" in refused.stderr) == (1, True)
    assert "up to date" in run(database, "db", "status").stdout
    assert "0008 → 0004" in run(database, "db", "downgrade", "0004", "--yes").stdout
    assert "nothing to take back" in run(database, "db", "downgrade", "0004", "--yes").stdout
    assert "0004 → no tables" in run(database, "db", "downgrade", "base", "--yes").stdout
    assert run(database, "db", "status").exit_code == 1
    assert "nothing to take back" in run(database, "db", "downgrade", "0004", "--yes").stdout
    assert "new → 0008" in run(database, "db", "upgrade").stdout


def test_an_unknown_revision_is_refused(database: str) -> None:
    unknown = run(database, "db", "downgrade", "0009", "--yes")
    assert (unknown.exit_code, unknown.stderr) == (
        1,
        "Error: there is no revision 0009, only base, 0004, 0005, 0006, 0007, 0008\n",
    )
    engine = open_engine(database)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    newer = run(database, "db", "downgrade", "0004", "--yes")
    assert (newer.exit_code, "of a newer version" in newer.stderr) == (1, True)


def test_a_database_from_before_the_first_release_is_refused_with_what_to_do(database: str) -> None:
    engine = open_engine(database)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0003'"))
    engine.dispose()
    for command in (("upgrade",), ("downgrade", "base", "--yes")):
        refused = run(database, "db", *command)
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
        assert "at revision 0003, from before the first release" in refused.stderr
        assert (
            "upgrade it to 0004 with a checkout of that time, or name a new database"
            in refused.stderr
        )
    assert run(database, "db", "status").exit_code == 1


@pytest.mark.parametrize("command", [("upgrade",), ("status",), ("downgrade", "0004", "--yes")])
def test_a_folder_that_cannot_be_made_is_an_error_of_one_sentence(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    said = run(f"sqlite:///{tmp_path}/file/t.db", "db", *command)
    words = "there is no database" if command == ("status",) else "cannot be made"
    assert (said.exit_code, said.stderr.count("\n"), words in said.stderr) == (1, 1, True)


def test_db_status_of_a_missing_database_creates_no_file(tmp_path: Path) -> None:
    answer = run(f"sqlite:///{tmp_path}/no/t.db", "db", "status")
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert f"there is no database at {tmp_path}/no/t.db" in answer.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("none.db", "there is no database at {}/none.db\n"),
        (
            "folder",
            "the database {}/folder cannot be opened: "
            "it must be a file, in a folder that this user may write to\n",
        ),
    ],
)
def test_a_database_that_cannot_be_opened_is_named_as_in_the_url(
    tmp_path: Path, place: str, says: str
) -> None:
    (tmp_path / "folder").mkdir()
    answer = run(f"sqlite:///{tmp_path}/{place}", "usage")
    assert (answer.exit_code, answer.stderr) == (1, "Error: " + says.format(tmp_path))


def test_a_database_of_another_kind_is_refused_by_name() -> None:
    answer = run("mysql://user:secret@host/db", "usage")
    assert (answer.exit_code, "begins with sqlite:/// or postgresql://" in answer.stderr) == (
        1,
        True,
    )
    assert "secret" not in answer.stderr
