"""`tokenmill dev`: where it cannot begin, one sentence and nothing left running; what is killed
under it starts again.
"""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from rich.console import Console
from typer.testing import CliRunner

from tests.support.lifecycle import need_valkey
from tests.support.worker import database_url
from tokenmill import Client
from tokenmill.cli import app
from tokenmill_gateway.keys import KeyStore
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.local.dev import ServiceWatch
from tokenmill_worker.local.gateway_process import first_key
from tokenmill_worker.local.valkey_server import free_port


def test_an_unreachable_database_is_an_error_of_one_sentence(
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


def test_a_given_port_is_used_or_refused_if_taken(
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


def test_a_redis_url_for_dev_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["dev", "--redis-url", "redis://queue.internal:6379/0"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 2
    assert "--redis-url: this command starts a server of its own" in done.stderr
    assert list(tmp_path.iterdir()) == []


class RunningDev:
    """`tokenmill dev` in a process of its own, and the lines that it has printed."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "tokenmill.cli", "dev", "--port", str(self.port)]
        command += ["--model", "synthetic", "--queue", "q"]
        self.process = subprocess.Popen(
            command, cwd=folder, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._arrived:
                self.lines.append(line)
                self._arrived.notify_all()

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()

    def wait_for(self, words: str) -> None:
        def is_there() -> bool:
            return any(words in line for line in self.lines)

        with self._arrived:
            assert self._arrived.wait_for(is_there, 60), "".join(self.lines)

    def gateway(self) -> tuple[str, str]:
        """Return the URL and the key that were printed for OpenAI's clients."""
        self.wait_for("export OPENAI_BASE_URL=")
        line = next(line for line in self.lines if "export OPENAI_BASE_URL=" in line)
        _, url, key = line.split()
        return url.partition("=")[2], key.partition("=")[2]

    def child(self, command: str) -> int:
        """Return the process of this service whose command line has these words."""
        for number in Path("/proc").iterdir():
            if not number.name.isdigit():
                continue
            try:
                words = (number / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                parent = re.search(r"PPid:\t(\d+)", (number / "status").read_text())
            except OSError:
                continue
            if command in words and parent and int(parent[1]) == self.process.pid:
                return int(number.name)
        raise AssertionError(f"no child runs {command}")


def models_of(url: str, key: str) -> set[str]:
    """Return the models of a gateway, which may just start."""
    with OpenAI(base_url=url, api_key=key, max_retries=10) as client:
        return {model.id for model in client.models.list()}


def test_a_first_key_stays_until_it_opens_nothing(tmp_path: Path) -> None:
    url, path = database_url(tmp_path), tmp_path / ".tokenmill" / "gateway.key"
    first = first_key(url, path)
    assert (first_key(url, path), path.stat().st_mode & 0o777) == (first, 0o600)
    with closing(KeyStore(url, "")) as store:
        store.revoke(first.split("-")[1])
        second = first_key(url, path)
        assert (store.opens(first), store.opens(second)) == (False, True)
    assert path.read_text() == second


@pytest.fixture
def running_dev(tmp_path: Path) -> Iterator[RunningDev]:
    need_valkey()
    running = RunningDev(tmp_path)
    try:
        running.wait_for("ready. In another terminal")
        yield running
    finally:
        status = running.end()
    assert status == 0, "".join(running.lines)


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_worker_server_or_gateway_is_restarted(running_dev: RunningDev) -> None:
    url, key = running_dev.gateway()
    running_dev.wait_for(f"in a browser: {url.removesuffix('v1')}\n")
    assert models_of(url, key) >= {"synthetic"}
    os.kill(running_dev.child("tokenmill.cli gateway"), signal.SIGKILL)
    running_dev.wait_for("the gateway was killed: it starts again")
    worker = running_dev.child("tokenmill.cli worker")
    server = running_dev.child(f" 127.0.0.1:{running_dev.port}")
    with Client(f"redis://127.0.0.1:{running_dev.port}/0", queue="q") as client:
        job = client.submit(prompt="before it", max_tokens=2)
        client.result(job, timeout=60)
        os.kill(server, signal.SIGKILL)
        running_dev.wait_for("the queue's server has ended: it starts again, with its data")
        os.kill(worker, signal.SIGKILL)
        running_dev.wait_for("the worker was killed by SIGKILL: it starts again in 1 s")
        running_dev.wait_for("the worker is ready again")
        later = client.submit(prompt="after it", max_tokens=3)
        assert client.result(later, timeout=60).status is JobStatus.SUCCEEDED
        assert client.status(job).status is JobStatus.SUCCEEDED
    assert running_dev.child("tokenmill.cli worker") != worker
    assert models_of(url, key) >= {"synthetic"}


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_worker_that_cannot_start_ends_the_service_after_its_reason(tmp_path: Path) -> None:
    need_valkey()
    command = [sys.executable, "-m", "tokenmill.cli", "dev", "--port", str(free_port())]
    done = subprocess.run(
        [*command, "--model", str(tmp_path / "none")],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert "the worker ended (2) before it was ready, so the service ends" in lines
    assert any(line.startswith("Error: there is no folder or file") for line in lines)


class ServiceOnPaper:
    """A service whose workers end one after the other as `ends` says; None: it lives."""

    def __init__(self, ends: list[int | None]) -> None:
        self.ends = ends
        self.has_server = True
        self.workers = 1
        self.ready = False

    @property
    def exit_status(self) -> int | None:
        return self.ends[0]

    def is_ready(self) -> bool:
        return self.ready

    def start_worker(self) -> None:
        self.workers += 1
        self.ends.pop(0)


class Pauses(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


@pytest.fixture
def watch_of() -> Callable[[Any], tuple[ServiceWatch, io.StringIO]]:
    def make(service: Any) -> tuple[ServiceWatch, io.StringIO]:
        said = io.StringIO()
        return ServiceWatch(service, Console(file=said, width=200), lambda: None), said

    return make


def test_a_worker_killed_before_it_is_ready_is_restarted_five_times(
    watch_of: Any,
) -> None:
    service, pauses = ServiceOnPaper([-9] * 6), Pauses()
    watch, said = watch_of(service)
    assert [watch.look(pauses) for _ in range(6)] == [None] * 5 + [9]
    assert pauses.seconds == [1, 2, 4, 8, 16]
    assert service.workers == 6
    last = said.getvalue().splitlines()[-1]
    assert last == "the worker was killed by SIGKILL, for the 6th time: the service ends"


def test_a_worker_that_was_ready_is_restarted_after_any_exit(watch_of: Any) -> None:
    service, pauses = ServiceOnPaper([None, 1, None, -11, None]), Pauses()
    watch, said = watch_of(service)
    service.ready = True
    assert watch.look(pauses) is None
    for number in range(2):
        service.ends.pop(0)
        assert watch.look(pauses) is None
        assert watch.look(pauses) is None
        assert service.workers == 2 + number
    assert pauses.seconds == [1, 1]
    assert "the worker ended (1): it starts again in 1 s" in said.getvalue()
    assert "the worker was killed by SIGSEGV: it starts again in 1 s" in said.getvalue()


def test_a_worker_that_has_drained_ends_the_service(watch_of: Any) -> None:
    watch, said = watch_of(ServiceOnPaper([0]))
    assert watch.look(Pauses()) == 0
    assert said.getvalue() == "the worker has drained, so the service ends\n"
