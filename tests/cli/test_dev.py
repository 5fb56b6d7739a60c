"""`tokenmill dev` where it cannot begin: one sentence, nothing left running."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from api_client.cli import app


def test_a_database_that_is_away_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = "postgresql://tm:secret@127.0.0.1:1/x"
    done = CliRunner().invoke(app, ["dev", "--database-url", url], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)  # not the driver's own, with its traceback
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: postgresql://tm:***@127.0.0.1:1/x: ")
    assert "Connection refused" in last


def test_another_server_is_refused_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["dev", "--redis-url", "redis://queue.internal:6379/0"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "--redis-url: this command starts a server of its own" in done.stderr
    assert list(tmp_path.iterdir()) == []
