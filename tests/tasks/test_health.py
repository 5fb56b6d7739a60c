"""Health and numbers of `tokenmill tasks`: what makes it unready, what only a restart repairs, and
what it counts.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.valkey import ControlledValkey
from tests.tasks.receiver import eventually
from tests.tasks.support import Clock, record, with_webhook
from tokenmill_worker.settings import Settings, load_settings
from tokenmill_worker.tasks.app import build_app
from tokenmill_worker.tasks.health import STUCK_S, TasksHealth
from tokenmill_worker.tasks.resources import TaskResources

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]
SWEEP = "tokenmill.webhooks.sweep"


def ask(port: int, path: str) -> tuple[int, dict[str, str]]:
    """Return the status, and the list of problems."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
            status, body = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
        error.close()
    checks: dict[str, str] = json.loads(body)["checks"]
    return status, {name: state for name, state in checks.items() if state != "ok"}


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        return str(reply.read().decode())


def overdue_s(text: str) -> float:
    found = re.search(r"^tokenmill:webhook_overdue_seconds (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


class ServedHealth:
    """The health pages without Celery's worker. `clock` and `beats` stand for time and for beat's
    thread, and are set by hand.
    """

    def __init__(self, settings: Settings) -> None:
        self.clock, self.beats = Clock(1_000.0), True
        self.resources = TaskResources(settings)
        self.app = build_app(settings, self.resources)
        self.health = TasksHealth(
            self.app,
            self.resources.backlog,
            lambda: self.beats,
            every_s=0.05,
            clock=lambda: self.clock.seconds,
        )
        self.port = self.health.start("127.0.0.1", 0)


@pytest.fixture
def watched(redis_url: str, sqlite_url: str, allowed_keys: list[str]) -> Iterator[ServedHealth]:
    allowed_keys.append("tm:tasks:*")
    made = ServedHealth(
        load_settings({"redis_url": redis_url, "database_url": sqlite_url, "webhook_secret": ""})
    )
    yield made
    made.health.stop()
    made.resources.engine.dispose()


def test_a_stuck_consumer_with_a_reachable_broker_fails_the_liveness_probe(
    watched: ServedHealth,
) -> None:
    eventually(lambda: set(ask(watched.port, "/readyz")[1]) == {"consumer"})
    assert ask(watched.port, "/livez") == (200, {})
    watched.clock.seconds += STUCK_S + 1
    status, wrong = ask(watched.port, "/livez")
    assert (status, list(wrong)) == (503, ["stuck"])
    assert re.search("stood still for 181 s", wrong["stuck"])


def test_an_ended_beat_fails_the_liveness_probe(watched: ServedHealth) -> None:
    watched.beats = False
    assert ask(watched.port, "/livez") == (503, {"beat": "its thread has ended"})


def test_webhooks_and_runs_are_counted(watched: ServedHealth, sqlite_url: str) -> None:
    record(
        sqlite_url,
        with_webhook("j1", "https://example.com/hook"),
        with_webhook("j2", "https://example.com/hook"),
    )
    with watched.resources.engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE webhooks SET due_ms = :due"),
            {"due": round((time.time() - 3_600) * 1000)},
        )
    watched.app.tasks[SWEEP].apply().get()
    watched.app.tasks["tokenmill.webhooks.deliver"].apply(("msg_unknown", 0)).get()
    eventually(lambda: 'tokenmill:webhooks{state="pending"} 2.0' in metrics(watched.port))
    # a look of before the update counts the same messages
    eventually(lambda: overdue_s(metrics(watched.port)) > 3_000)
    text = metrics(watched.port)
    assert f'tokenmill:task_runs_total{{outcome="success",task="{SWEEP}"}} 1.0' in text
    assert (
        'tokenmill:task_runs_total{outcome="skipped",task="tokenmill.webhooks.deliver"} 1.0' in text
    )
    assert f'tokenmill:task_seconds_count{{task="{SWEEP}"}} 1.0' in text
    assert overdue_s(text) == pytest.approx(3_600, abs=300)
    succeeded = rf'task_last_success_timestamp_seconds\{{task="{SWEEP}"\}} [1-9]'
    assert re.search(succeeded, text), "beat's tasks are there before they ran"


@contextlib.contextmanager
def tasks(port: int, log: Path, **variables: Any) -> Iterator["subprocess.Popen[bytes]"]:
    ours = {"METRICS_PORT": port, "QUEUE": "q", **variables}
    environment = os.environ | {f"TOKENMILL_{name}": str(value) for name, value in ours.items()}  # noqa: TID251
    command = [sys.executable, "-m", "tokenmill.cli", "tasks"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=log.parent
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_an_unreachable_broker_fails_only_the_readiness_probe(
    make_valkey: Callable[..., ControlledValkey], sqlite_url: str, tmp_path: Path
) -> None:
    server, port = make_valkey(), free_port()
    log = tmp_path / "tasks.log"

    def is_ready(path: str = "/readyz") -> bool:
        with contextlib.suppress(OSError):  # it has not begun to serve
            return ask(port, path) == (200, {})
        return False

    with tasks(port, log, REDIS_URL=server.url, DATABASE_URL=sqlite_url):
        eventually(is_ready)
        eventually(
            lambda: (
                re.search(rf'runs_total{{outcome="success",task="{SWEEP}"}} [1-9]', metrics(port))
                is not None
            )
        )
        server.halt(signal.SIGKILL)
        eventually(lambda: "broker" in ask(port, "/readyz")[1])
        assert is_ready("/livez"), "a restart would repair nothing"
        eventually(lambda: "beat cannot start its tasks: " in log.read_text())
        server.start()
        eventually(is_ready)
    logged = log.read_text()
    assert "Traceback" not in logged, "a sweep fails every 0.2 s; one line says it"
    assert logged.count("beat cannot start its tasks: ") <= 5


@pytest.mark.slow
def test_a_taken_port_is_an_error_of_one_sentence(
    redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        variables = {
            "REDIS_URL": redis_url,
            "DATABASE_URL": sqlite_url,
            "METRICS_PORT": str(port),
            "QUEUE": "q",
        }
        done = subprocess.run(
            [sys.executable, "-m", "tokenmill.cli", "tasks"],
            env=os.environ | {f"TOKENMILL_{name}": value for name, value in variables.items()},  # noqa: TID251
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert done.returncode == 1
    assert (
        f"/metrics cannot be served on 127.0.0.1:{port}: Address already in use"
        in done.stderr.replace("\n", " ")
    )
    assert "Traceback" not in done.stderr
