"""Several Valkey servers that act as one: a cluster of primaries (with replicas if asked), and a
primary with replicas under the eyes of sentinels. Small timeouts, so that a failover takes a second
or two.
"""

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import redis

from tests.support.valkey import ControlledValkey
from tokenmill_worker.local.valkey_server import ManagedProcess, free_port

_NUM_SLOTS = 16_384
_TIMEOUT_S = 120.0


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = _TIMEOUT_S) -> None:
    """Poll until the condition holds; errors of servers that are not up yet count as false."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except redis.RedisError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{what} did not come true within {timeout_s:.0f} s")


class ValkeyCluster(ManagedProcess):
    """`num_primaries` share the slots evenly; node i + num_primaries × k is a replica of node i."""

    def __init__(
        self,
        num_primaries: int = 3,
        num_replicas: int = 0,
        *,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._num_primaries = num_primaries
        self._bus_ports: list[int] = []
        self.nodes: list[ControlledValkey] = []
        for _ in range(num_primaries * (1 + num_replicas)):
            self._bus_ports.append(free_port())
            own = {
                "cluster-enabled": "yes",
                "cluster-port": str(self._bus_ports[-1]),
                "cluster-node-timeout": "1000",
                "cluster-replica-validity-factor": "0",
            }
            self.nodes.append(ControlledValkey(settings={**own, **(settings or {})}))

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self.stop)
            for node in self.nodes:
                node.start()
            self._form()
            undo.pop_all()
        return self

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def node_of(self, key: str) -> ControlledValkey:
        """Return the primary that serves a key now."""
        slot = self._ask(self._living(), "CLUSTER KEYSLOT", key)
        for first, last, primary, *_ in self._ask(self._living(), "CLUSTER SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == primary[1])
        raise LookupError(f"nobody answers for slot {slot}")

    def _form(self) -> None:
        first = self.nodes[0]
        for node, bus_port in zip(self.nodes[1:], self._bus_ports[1:], strict=True):
            self._ask(first, "CLUSTER MEET", "127.0.0.1", node.port, bus_port)
        for index, node in enumerate(self.nodes[: self._num_primaries]):
            start = _NUM_SLOTS * index // self._num_primaries
            end = _NUM_SLOTS * (index + 1) // self._num_primaries - 1
            self._ask(node, "CLUSTER ADDSLOTSRANGE", start, end)
        wait_until(
            lambda: all(self._sees_all(node) for node in self.nodes), "the nodes' acquaintance"
        )
        for index, node in enumerate(self.nodes[self._num_primaries :]):
            primary = self._ask(self.nodes[index % self._num_primaries], "CLUSTER MYID")
            self._ask(node, "CLUSTER REPLICATE", primary)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until every node reports that all slots are served."""
        wait_until(
            lambda: all(self._is_ready(node) for node in self.nodes), "the cluster's readiness"
        )

    def _sees_all(self, node: ControlledValkey) -> bool:
        return int(self._info(node)["cluster_known_nodes"]) == len(self.nodes)

    def _is_ready(self, node: ControlledValkey) -> bool:
        known = self._info(node)
        if known["cluster_state"] != "ok" or int(known["cluster_slots_ok"]) != _NUM_SLOTS:
            return False
        with node.client() as client:
            role: Any = client.execute_command("ROLE")
        return bool(role[0] == b"master" or role[3] == b"connected")

    def _info(self, node: ControlledValkey) -> dict[str, str]:
        text = self._ask(node, "CLUSTER INFO")
        lines = (
            text
            if isinstance(text, dict)
            else dict(line.split(":") for line in text.decode().split())
        )
        return {str(name): str(value) for name, value in lines.items()}

    def _living(self) -> ControlledValkey:
        return next(node for node in self.nodes if node.is_running)

    @staticmethod
    def _ask(node: ControlledValkey, command: str, *arguments: object) -> Any:
        with node.client() as client:
            return client.execute_command(command, *arguments)


class _SentinelProcess(ControlledValkey):
    """The same binary, watching a primary. It writes what it learns into its configuration file."""

    _ready_line = b"Sentinel ID is"

    def __init__(
        self, service: str, primary_port: int, quorum: int, *, auth: bool, binary: Path | None
    ) -> None:
        super().__init__(persistent=False, binary=binary)
        self._watched = (
            f"sentinel monitor {service} 127.0.0.1 {primary_port} {quorum}",
            f"sentinel down-after-milliseconds {service} 500",
            f"sentinel failover-timeout {service} 2000",
            f"sentinel parallel-syncs {service} 1",
            *(_sentinel_login(service) if auth else ()),
        )

    def _config_lines(self) -> list[str]:
        return [
            f"port {self.port}",
            "bind 127.0.0.1",
            f'dir "{self.directory}"',
            "loglevel notice",
            *self._watched,
        ]

    def _arguments(self) -> list[str]:
        return ["--sentinel"]


def _sentinel_login(service: str) -> tuple[str, str]:
    return (
        f"sentinel auth-user {service} sentinel",
        f"sentinel auth-pass {service} change-me-sentinel",
    )


_REPLICA_LOGIN = {"masteruser": "replica", "masterauth": "change-me-replica"}


class SentinelGroup(ManagedProcess):
    """One primary, replicas of it, and three sentinels that agree by two. `users` is a copy of
    ops/deploy/redis/users.acl, under which all of them then work.
    """

    def __init__(
        self,
        num_replicas: int = 1,
        service: str = "main",
        *,
        users: Path | None = None,
        binary: Path | None = None,
    ) -> None:
        self.service = service
        self._binary = binary
        self._has_users = users is not None
        settings = _REPLICA_LOGIN | {"aclfile": str(users)} if users is not None else None
        self.servers = [
            ControlledValkey(settings=settings, binary=binary) for _ in range(1 + num_replicas)
        ]
        self.sentinels: list[_SentinelProcess] = []

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.service}/0"

    def start(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self.stop)
            primary, *replicas = [server.start() for server in self.servers]
            for replica in replicas:
                with self._administer(replica) as client:
                    client.execute_command("REPLICAOF", "127.0.0.1", primary.port)
            wait_until(lambda: all(self.is_in_step(replica) for replica in replicas), "replication")
            self.sentinels = [
                _SentinelProcess(
                    self.service, primary.port, 2, auth=self._has_users, binary=self._binary
                )
                for _ in range(3)
            ]
            for sentinel in self.sentinels:
                sentinel.start()
            wait_until(
                lambda: all(self._sees_all(sentinel) for sentinel in self.sentinels),
                "the sentinels' view",
            )
            undo.pop_all()
        return self

    def stop(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.stop()

    @property
    def primary(self) -> ControlledValkey:
        """Return the primary that the sentinels name now."""
        with self.sentinels[0].client() as client:
            address: Any = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self.service)
        return next(server for server in self.servers if server.port == int(address[1]))

    def fail_over(self) -> ControlledValkey:
        """Kill the primary; returns the new one once it takes writes."""
        old = self.primary
        old.halt(signal.SIGKILL)
        wait_until(
            lambda: self.primary is not old and self._takes_writes(self.primary), "a new primary"
        )
        return self.primary

    def _administer(self, server: ControlledValkey) -> "redis.Redis":
        login = {"username": "operator", "password": "change-me-operator"}
        return server.client(**(login if self._has_users else {}))

    def _takes_writes(self, server: ControlledValkey) -> bool:
        with self._administer(server) as client:
            role: Any = client.execute_command("ROLE")
        return bool(role[0] == b"master")

    def is_in_step(self, server: ControlledValkey) -> bool:
        with self._administer(server) as client:
            role: Any = client.execute_command("ROLE")
        return bool(role[0] == b"slave" and role[3] == b"connected")

    def _sees_all(self, sentinel: ControlledValkey) -> bool:
        with sentinel.client() as client:
            state: Any = client.execute_command("SENTINEL MASTER", self.service)
        fields = (
            state if isinstance(state, dict) else dict(zip(state[::2], state[1::2], strict=True))
        )
        fields = {(k.decode() if isinstance(k, bytes) else k): v for k, v in fields.items()}
        others = int(fields["num-other-sentinels"])
        return (
            others == len(self.sentinels) - 1 and int(fields["num-slaves"]) == len(self.servers) - 1
        )
