"""A worker looks at its server before it uses it, and while it runs: a server that would lose jobs
is refused at the start, and a problem of the health page later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError

from tests.support.other_servers import binary_of, every_server
from tests.support.topologies import ValkeyCluster
from tests.support.valkey import ControlledValkey
from tests.support.waiting import until
from tests.support.worker import QUEUE, client_of, database_url, running_worker
from tokenmill import QueueUnavailable
from tokenmill.transport.connect import connect_async
from tokenmill_schemas.keys import Keys
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.local.doctor import examine
from tokenmill_worker.queue.server_check import ServerWatch, read_server
from tokenmill_worker.settings import load_settings

RULES = (Path(__file__).parents[2] / "ops/deploy/redis/users.acl").read_text("utf-8")
SHIPPED = "user default off allkeys allchannels +@all"
KEY = Keys(QUEUE).meta
DROPS = "a restart drops what scripts wrote"

MakeValkey = Callable[..., ControlledValkey]


def with_users(make_valkey: MakeValkey, folder: Path, rules: str, **options: Any) -> str:
    """Start a server with a list of users; returns the address of its `worker`."""
    users = folder / "users.acl"
    users.write_text(rules)
    server = make_valkey(settings={"aclfile": str(users)}, **options)
    return server.url.replace("://", "://worker:change-me-worker@")


@pytest.mark.redis
@every_server
@pytest.mark.parametrize(
    "default_user",
    [
        "user default off",
        "user default off ~other:* &* +@all",
        "user default off allkeys allchannels +@read",
    ],
)
async def test_a_default_user_without_rights_for_the_scripts_stops_the_start(
    make_valkey: MakeValkey, tmp_path: Path, server_name: str, default_user: str
) -> None:
    rules = RULES.replace(SHIPPED, default_user)
    url = with_users(make_valkey, tmp_path, rules, binary=binary_of(server_name))
    with pytest.raises(SettingsError, match=DROPS):
        async with running_worker(url, database_url(tmp_path)):
            pass
    findings = await asyncio.to_thread(examine_servers, url, tmp_path)
    found = [one for one in findings if DROPS in one.words]
    assert [one.severity for one in found] == ["error"]


def examine_servers(url: str, folder: Path) -> list[Any]:
    settings = {"redis_url": url, "database_url": f"sqlite:///{folder}/t.db"}
    return examine(load_settings(settings, strict=False), servers_only=True)


@pytest.mark.redis
@pytest.mark.parametrize(
    ("default_user", "settings"),
    [
        (SHIPPED, {}),
        ("user default on nopass allkeys allchannels +@all", {}),
        ("user default off", {"appendonly": "no"}),  # it keeps nothing: another matter
    ],
)
async def test_a_server_that_evicts_no_keys_is_accepted(
    make_valkey: MakeValkey, tmp_path: Path, default_user: str, settings: dict[str, str]
) -> None:
    users = tmp_path / "users.acl"
    users.write_text(RULES.replace(SHIPPED, default_user))
    server = make_valkey(settings={"aclfile": str(users), **settings})
    url = server.url.replace("://", "://worker:change-me-worker@")
    async with redis.asyncio.Redis.from_url(url) as client:
        assert (await read_server(client, KEY)).problems() == []


@pytest.mark.redis
@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (" +acl|dryrun", "may not run ACL DRYRUN: whether a restart of the server keeps the jobs"),
        (" +info", "may not read the server's INFO"),
    ],
)
async def test_a_user_without_the_right_to_inspect_causes_one_warning(
    make_valkey: MakeValkey,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    missing: str,
    says: str,
) -> None:
    url = with_users(make_valkey, tmp_path, RULES.replace(missing, ""))
    async with redis.asyncio.Redis.from_url(url) as client:
        await ServerWatch(client, KEY).check()
    assert [says in one.message for one in caplog.records] == [True]


@pytest.mark.redis
async def test_a_worker_under_the_shipped_users_logs_no_warning(
    make_valkey: MakeValkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = with_users(make_valkey, tmp_path, RULES)
    async with running_worker(url, database_url(tmp_path)):
        pass
    assert [one.message for one in caplog.records if one.levelno > logging.INFO] == []


@pytest.mark.redis
@pytest.mark.parametrize(
    ("spoil", "repair", "says"),
    [
        (
            ("CONFIG", "SET", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru"),
            ("CONFIG", "SET", "maxmemory-policy", "noeviction"),
            "maxmemory-policy is allkeys-lru",
        ),
        (
            ("ACL", "SETUSER", "default", "-@all"),
            ("ACL", "SETUSER", "default", "+@all"),
            DROPS,
        ),
    ],
)
async def test_a_server_that_begins_to_lose_jobs_fails_the_health_page_and_is_logged_once(
    make_valkey: MakeValkey,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: tuple[str, ...],
    repair: tuple[str, ...],
    says: str,
) -> None:
    caplog.set_level(logging.INFO)
    url = with_users(make_valkey, tmp_path, RULES)
    async with (
        running_worker(url, database_url(tmp_path)) as worker,
        redis.asyncio.Redis.from_url(
            url.replace("worker:change-me-worker", "operator:change-me-operator")
        ) as operator,
    ):
        worker.stream.server._interval_s = 0.02
        await worker.stream.server.check()  # well, until somebody changes it
        looking = asyncio.create_task(worker.stream.server.run())
        redis_check = next(one for one in worker.reporter.checks() if one.name == "redis")
        assert redis_check.problem() is None
        await operator.execute_command(*spoil)
        await until(lambda: says in (redis_check.problem() or ""))
        await asyncio.sleep(0.2)
        await operator.execute_command(*repair)
        await until(lambda: redis_check.problem() is None)
        looking.cancel()
    told = [one.message for one in caplog.records if says in one.message]
    assert len(told) == 1


@pytest.mark.redis
async def test_a_full_server_is_reported_by_the_health_page_and_by_submit(
    make_valkey: MakeValkey, tmp_path: Path
) -> None:
    server = make_valkey()
    database = database_url(tmp_path)
    async with (
        running_worker(server.url, database, lease_seconds=0.5) as worker,
        client_of(server.url) as client,
    ):
        redis_check = next(one for one in worker.reporter.checks() if one.name == "redis")
        server.configure(maxmemory=1)
        full = "Redis refuses writes: used memory > 'maxmemory'"
        await until(lambda: redis_check.problem() == full)
        with pytest.raises(QueueUnavailable) as refused:
            await client.submit(prompt="x")
        assert str(refused.value) == full
        server.configure(maxmemory=0)
        await until(lambda: redis_check.problem() is None)


async def test_a_server_older_than_redis_7_is_refused() -> None:
    class OldServer:
        async def execute_command(self, name: str, *_: object) -> dict[str, object]:
            if name == "INFO":
                return {"redis_version": "6.2.14", "aof_enabled": 1}
            raise NoPermissionError("unknown subcommand")

    client: Any = OldServer()
    with pytest.raises(SettingsError, match=r"Redis 6\.2\.14; Redis 7\.0 is the oldest"):
        await ServerWatch(client, KEY).check()


async def test_the_server_check_continues_after_an_unreachable_server() -> None:
    replies: list[Any] = [ConnectionError("away"), TimeoutError(), {"redis_version": "7.0.1"}]

    async def execute_command(name: str, *_: object) -> Any:
        if name != "INFO":
            return b"OK"
        reply = replies.pop(0) if replies else {"redis_version": "7.0.1"}
        if isinstance(reply, Exception):
            raise reply
        return reply

    client: Any = SimpleNamespace(execute_command=execute_command)
    watch = ServerWatch(client, KEY, interval_s=0.001)
    looking = asyncio.create_task(watch.run())
    await until(lambda: not replies)
    assert watch.problem is None
    assert not looking.done()
    looking.cancel()


@pytest.mark.redis
@pytest.mark.slow
async def test_in_a_cluster_the_queue_s_node_is_checked_before_and_after_a_failover() -> None:
    limits = {"maxmemory": "64mb"}
    with ValkeyCluster(num_primaries=3, num_replicas=1, settings=limits) as cluster:
        client = connect_async(cluster.url)
        watch = ServerWatch(client, KEY, interval_s=0.05)
        looking = asyncio.create_task(watch.run())
        await until(lambda: watch.memory is not None)
        owner = cluster.node_of(KEY)
        owner.kill()
        await until(lambda: watch.memory is None)
        await until(lambda: watch.memory is not None)
        successor = await asyncio.to_thread(cluster.node_of, KEY)
        assert successor is not owner
        successor.configure(maxmemory_policy="allkeys-lru")
        await until(lambda: watch.problem is not None)
        looking.cancel()
        await client.aclose()
