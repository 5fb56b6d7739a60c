"""Tests of the broker URL that Celery gets."""

import pytest

from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings import load_settings
from tokenmill_worker.tasks.app import broker_url


@pytest.mark.parametrize(
    ("queue", "broker"),
    [
        ("rediss://u:p@h:1/2", "rediss://u:p@h:1/2"),
        ("unix:///run/r.sock", "redis+socket:///run/r.sock"),
    ],
)
def test_the_broker_url_is_the_queue_s_server_in_celery_s_spelling(queue: str, broker: str) -> None:
    assert broker_url(load_settings({"redis_url": queue})) == broker
    assert broker_url(load_settings({"tasks_broker_url": queue})) == broker


def test_a_cluster_as_broker_is_refused() -> None:
    with pytest.raises(SettingsError, match="TOKENMILL_TASKS_BROKER_URL"):
        broker_url(load_settings({"redis_url": "redis+cluster://h"}))
