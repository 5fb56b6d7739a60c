"""`tokenmill dev` where it cannot begin: one sentence, nothing left running."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenmill.cli import app


def test_a_database_that_is_away_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = "postgresql://tm:secret@127.0.0.1:1/x"
    done = CliRunner().invoke(app, ["dev", "--database-url", url], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)  # not the driver's own, with its traceback
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: postgresql://tm:***@127.0.0.1:1/x: ")
    assert "Connection refused" in last


def test_a_port_of_one_s_own_is_taken_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["dev", "--port", str(port)], env={"COLUMNS": "200"})
    assert done.exit_code == 1, "it must not take another"
    assert f"{port}" in done.stderr
    done = CliRunner().invoke(app, ["dev", "--port", "no"], env={"COLUMNS": "200"})
    assert (
        done.exit_code,
        "--port must be a whole number from 1 to 65535, not 'no'" in done.stderr,
    ) == (2, True)


def test_another_server_is_refused_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["dev", "--redis-url", "redis://queue.internal:6379/0"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 2
    assert "--redis-url: this command starts a server of its own" in done.stderr
    assert list(tmp_path.iterdir()) == []
