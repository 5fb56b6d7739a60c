"""Impossible import requests give a sentence in the log and a task that fails for good."""

import contextlib
from pathlib import Path

import pytest

from tokenmill.errors import ConfigurationError
from tokenmill_worker.settings import load_settings
from tokenmill_worker.tasks.app import build_app
from tokenmill_worker.tasks.bulk_files import THREADS, ImportRequest, NoFreeThread
from tokenmill_worker.tasks.resources import TaskResources


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({"completion_windw": "1h"}, "has no completion_windw"),
        ({"completion_window": 5}, "completion_window"),
        ({"batch_id": "mine"}, "has no batch_id"),
    ],
)
def test_an_import_with_unknown_terms_fails_with_one_sentence(
    sqlite_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    terms: dict[str, object],
    says: str,
) -> None:
    app = build_app(
        load_settings(
            {"database_url": sqlite_url, "redis_url": "redis://127.0.0.1:1/0", "queue": "q"}
        )
    )
    outcome = app.tasks["tokenmill.bulk.import"].apply(
        kwargs={"source": str(tmp_path / "in.jsonl"), **terms}
    )
    assert isinstance(outcome.result, ConfigurationError)
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert says in said.getMessage()
    assert not said.exc_info


@pytest.mark.redis
@pytest.mark.parametrize("name", ["none.jsonl", "."])
def test_a_file_that_cannot_be_read_fails_with_one_sentence(
    sqlite_url: str, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    app = build_app(
        load_settings({"database_url": sqlite_url, "redis_url": redis_url, "queue": "q"})
    )
    source = tmp_path / name
    outcome = app.tasks["tokenmill.bulk.import"].apply(
        kwargs={"source": str(source), "output": str(tmp_path / "o")}
    )
    assert outcome.state == "FAILURE"
    assert isinstance(outcome.result, ConfigurationError)
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"was not imported: cannot read {source}: " in said.getMessage()
    assert not any(record.exc_info for record in caplog.records)


def test_imports_take_at_most_half_of_the_threads(sqlite_url: str) -> None:
    """A file without a free thread of its kind frees the one it has for webhooks and upkeep, and is
    retried later.
    """
    own = {
        "database_url": sqlite_url,
        "redis_url": "redis://127.0.0.1:1/0",
        "queue": "q",
    }
    resources = TaskResources(load_settings(own))
    with contextlib.ExitStack() as held:
        for _ in range(THREADS // 2):
            held.enter_context(resources.bulk.thread())
        with pytest.raises(NoFreeThread):
            resources.bulk.import_file(ImportRequest.of("batch_x", source="in.jsonl"))
        with pytest.raises(NoFreeThread):
            resources.bulk.export_file("batch_x", "q", "out.jsonl", None)
    with resources.bulk.thread():
        pass
