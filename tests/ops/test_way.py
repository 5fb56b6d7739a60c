"""A job's way from `Client.submit` to its row in SQL stays short enough to be read."""

from pathlib import Path

import pytest

from ops.tools.way import MAX_FILES, ROOT, measure
from tests.support.worker import database_url

pytestmark = pytest.mark.redis


def test_a_job_passes_through_few_files_of_all_three_processes(
    redis_url: str, tmp_path: Path, allowed_keys: list[str]
) -> None:
    allowed_keys.append("*")  # a worker that is killed in the middle of a call leaves some
    files = list(map(str, measure(redis_url, database_url(tmp_path))))
    assert len(files) <= MAX_FILES, "\n".join(files)
    found = {
        "producer": "api_client/tokenmill/operations/submit.py",
        "worker": "worker/tokenmill_worker/record/finalizer.py",
        "engine": "worker/tokenmill_worker/engines/own/stepping.py",
    }
    assert {name for name, path in found.items() if path in files} == set(found)
    assert all((ROOT / name).is_file() for name in files)
    assert not any("/telemetry/" in name for name in files)
    started = "worker/tokenmill_worker/settings/loading.py"
    assert started not in files
