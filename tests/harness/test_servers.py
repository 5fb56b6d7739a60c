"""The test servers start, lose or keep their data as asked, and never outlive their starter."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from tests.support.leaks import leaked_keys
from tests.support.postgres import PostgresServer
from tests.support.proxy import FaultProxy
from tests.support.valkey import ControlledValkey
from tokenmill_worker.local.valkey_server import ValkeyServer, ValkeyServerError

pytestmark = pytest.mark.redis

MakeValkey = Callable[..., ControlledValkey]


def is_gone(pid: int, within_s: float = 30.0) -> bool:
    """Return True if the process ends in time.

    A zombie counts as ended: its parent may collect it late.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def wait_until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.02)


@pytest.mark.parametrize("crash", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_restart_keeps_or_wipes_data_on_the_same_port(
    make_valkey: MakeValkey, keep: bool, crash: bool
) -> None:
    server = make_valkey()
    port = server.port
    with server.client() as client:
        client.set("answer", 42)
    server.restart(keep=keep, crash=crash)
    assert server.port == port
    with server.client() as client:
        assert client.get("answer") == (b"42" if keep else None)


def test_settings_reach_the_server(make_valkey: MakeValkey) -> None:
    server = make_valkey(settings={"maxmemory": "64mb", "requirepass": 'a "quoted" secret'})
    with server.client(password='a "quoted" secret') as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(64 << 20)}


def test_a_fixed_port_that_is_taken_is_a_clear_error(valkey: ControlledValkey) -> None:
    server = ValkeyServer(port=valkey.port)
    with pytest.raises(ValkeyServerError, match="did not start"):
        server.start()
    server.stop()


def test_a_frozen_server_answers_after_the_thaw(make_valkey: MakeValkey) -> None:
    server = make_valkey()
    with server.client() as client, server.client(socket_timeout=0.2, retry=None) as hasty:
        assert client.ping()
        server.freeze()
        with pytest.raises(redis.TimeoutError):
            hasty.ping()
        server.thaw()
        assert client.ping()


@pytest.mark.parametrize("from_thread", [False, True])
def test_the_server_dies_with_a_killed_parent(from_thread: bool, tmp_path: Path) -> None:
    body = (
        "import threading, time\n"
        "from pathlib import Path\n"
        "from tokenmill_worker.local.valkey_server import ValkeyServer\n"
        f"server = ValkeyServer(Path({str(tmp_path / 'data')!r}))\n"
        + (
            "t = threading.Thread(target=server.start); t.start(); t.join()\n"
            if from_thread
            else "server.start()\n"
        )
        + "print(server.pid, server.is_running, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", body], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid, alive = parent.stdout.readline().split()
        assert alive == "True"
        time.sleep(0.2)
        assert not is_gone(int(pid), within_s=0.1), "it must outlive the thread that started it"
        parent.kill()
    assert is_gone(int(pid))


HOLDS = (
    "import time\n"
    "from tokenmill_worker.system.private_directory import private_directory\n"
    "print(private_directory('valkey'), flush=True)\n"
    "time.sleep(600)\n"
)


def test_the_private_directory_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", HOLDS]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # noqa: TID251 - handed on
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout is not None
        assert living.stdout is not None
        names = [Path(said.readline().strip()) for said in (killed.stdout, living.stdout)]
        (names[0] / "a socket").touch()
        killed.kill()
        killed.wait()
        try:
            with ValkeyServer() as server:
                assert server.directory.parent == tmp_path
                found = [one.exists() for one in (*names, server.directory)]
        finally:
            living.kill()
    assert found == [False, True, True]
    assert not server.directory.exists()


def test_a_private_server_that_starts_again_has_another_private_directory() -> None:
    server = ValkeyServer()
    with server:
        first = server.directory
    with server:
        assert server.directory != first
        assert server.directory.name.startswith("tokenmill_valkey_")


class TestLeaks:
    def test_permanent_and_expiring_keys_are_no_leaks(self, redis_url: str) -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.set("tm:{q}:idem:tenant:key", "job", ex=60)
            client.xadd("tm:{q}:jobs:bulk:a:b", {"id": "1"})
            client.hset("tm:{q}:meta", "accepted", 1)
            client.hset("tm:{q}:job:1", "state", "running")
            assert leaked_keys(client) == []

    @pytest.mark.parametrize(
        ("key", "field"),
        [
            ("tm:{q}:log:1", "x"),
            ("tm:{q}:invented", "x"),
            ("stray", "x"),
            ("tm:{q}:job:1", "y"),
            ("tm:{q}:tenant:a", "x"),
        ],
    )
    def test_a_key_without_ttl_or_of_an_unknown_name_is_a_leak(
        self, redis_url: str, allowed_keys: list[str], key: str, field: str
    ) -> None:
        allowed_keys.append("*")  # for the fixture's own check, after this test
        with redis.Redis.from_url(redis_url) as client:
            client.hset(key, mapping={field: "1", "state": "succeeded"})
            assert [line.split(": ")[0] for line in leaked_keys(client)] == [key]
            client.expire(key, 60)
            assert leaked_keys(client) == []


class TestProxy:
    def test_a_proxy_passes_refuses_and_passes_again(
        self, redis_url: str, valkey: ControlledValkey, make_proxy: Callable[[int], FaultProxy]
    ) -> None:
        proxy = make_proxy(valkey.port)
        hasty = redis.Redis.from_url(proxy.url, socket_timeout=0.3, retry=None)
        with redis.Redis.from_url(proxy.url, retry=None) as client, hasty:
            assert client.ping()
            proxy.cut(refuse=True)
            with pytest.raises(redis.ConnectionError):
                client.ping()
            proxy.heal()
            assert client.ping()
            proxy.freeze()
            with pytest.raises(redis.TimeoutError):
                hasty.ping()
            proxy.heal()
            assert client.ping()

    def test_a_command_whose_reply_is_lost_was_executed(
        self, redis_url: str, valkey: ControlledValkey, make_proxy: Callable[[int], FaultProxy]
    ) -> None:
        proxy = make_proxy(valkey.port)
        with redis.Redis.from_url(proxy.url, retry=None) as client:
            client.ping()
            proxy.lose_replies()
            with pytest.raises(redis.ConnectionError):
                client.set("key", 1, ex=60)
        with valkey.client() as direct:
            assert direct.get("key") == b"1"

    def test_a_client_reads_the_end_of_a_half_closed_connection(
        self, redis_url: str, valkey: ControlledValkey, make_proxy: Callable[[int], FaultProxy]
    ) -> None:
        proxy = make_proxy(valkey.port)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
            client.sendall(b"PING\r\n")
            assert client.recv(100) == b"+PONG\r\n"
            proxy.half_close(towards_client=True)
            assert client.recv(100) == b""
            client.sendall(b"SET key 1 EX 60\r\n")
            with valkey.client() as direct:
                wait_until(lambda: direct.get("key") == b"1")

    def test_a_half_closed_server_side_ends_the_connection(
        self, redis_url: str, valkey: ControlledValkey, make_proxy: Callable[[int], FaultProxy]
    ) -> None:
        proxy = make_proxy(valkey.port)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
            client.sendall(b"PING\r\n")
            assert client.recv(100) == b"+PONG\r\n"
            proxy.half_close(towards_client=False)
            with pytest.raises(ConnectionResetError):
                client.recv(100)

    def test_lost_bytes_are_not_delivered_before_the_reset(
        self, redis_url: str, valkey: ControlledValkey, make_proxy: Callable[[int], FaultProxy]
    ) -> None:
        proxy = make_proxy(valkey.port)
        hasty = redis.Redis.from_url(proxy.url, retry=None, socket_timeout=0.3)
        with hasty, socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
            assert hasty.ping()
            proxy.lose_bytes()
            with pytest.raises(redis.TimeoutError):
                hasty.set("key", 1, ex=60)
            proxy.heal()
            with pytest.raises(ConnectionResetError):
                client.recv(100)
            assert hasty.get("key") is None

    def test_data_sent_a_few_bytes_at_a_time_arrives_whole(
        self, redis_url: str, valkey: ControlledValkey, make_proxy: Callable[[int], FaultProxy]
    ) -> None:
        proxy = make_proxy(valkey.port)
        with redis.Redis.from_url(proxy.url, retry=None) as client:
            proxy.trickle()
            for size in (1, 50_000):
                client.set("key", b"x" * size, ex=60)
                assert client.get("key") == b"x" * size

    def test_a_delayed_connection_replies_late(
        self, redis_url: str, valkey: ControlledValkey, make_proxy: Callable[[int], FaultProxy]
    ) -> None:
        proxy = make_proxy(valkey.port)
        with redis.Redis.from_url(proxy.url, retry=None) as client:
            client.ping()
            proxy.delay(0.1)
            started = time.monotonic()
            client.ping()
            assert time.monotonic() - started >= 0.2


@pytest.mark.postgres
class TestPostgres:
    def test_each_created_database_is_empty(
        self, postgres: PostgresServer, postgres_url: str
    ) -> None:
        other = postgres.create_database()
        with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
            connection.execute("CREATE TABLE t (x int)")
        with psycopg.connect(other.replace("+psycopg", "")) as connection:
            assert connection.execute("SELECT to_regclass('t')").fetchone() == (None,)
        postgres.drop_database(other)

    @pytest.mark.parametrize("how", ["stop", "crash", "kill"])
    def test_data_survives_stop_crash_and_kill_of_postgres(
        self, own_postgres: PostgresServer, how: str
    ) -> None:
        own_postgres.execute("CREATE TABLE kept AS SELECT 7 AS x")
        port = own_postgres.port
        if how == "kill":
            own_postgres.kill()
            with pytest.raises(psycopg.OperationalError):
                own_postgres.execute("SELECT 1")
            own_postgres.start()
        else:
            own_postgres.restart(crash=how == "crash")
        assert own_postgres.port == port
        own_postgres.execute("INSERT INTO kept VALUES (8)")

    def test_a_postgres_server_ends_with_its_killed_parent(self) -> None:
        body = (
            "import time\n"
            "from tests.support.postgres import PostgresServer\n"
            "server = PostgresServer().start()\n"
            "print(server._child.process.pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        root = Path(__file__).parents[2]
        parent = subprocess.Popen(
            [sys.executable, "-c", body], stdout=subprocess.PIPE, text=True, cwd=root
        )
        assert parent.stdout is not None
        with parent, parent.stdout:
            server = psutil.Process(int(parent.stdout.readline()))
            family = [server.pid, *(child.pid for child in server.children(recursive=True))]
            assert len(family) > 1
            parent.send_signal(signal.SIGKILL)
        assert all(is_gone(pid) for pid in family)
