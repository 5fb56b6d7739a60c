"""The cluster and the sentinels that other tests rely on do what such things do."""

import pytest
import redis
from redis.cluster import RedisCluster
from redis.sentinel import Sentinel

from tests.support.topologies import SentinelGroup, ValkeyCluster, wait_until

pytestmark = pytest.mark.redis


def test_a_cluster_spreads_keys_and_refuses_to_mix_slots(valkey_cluster: ValkeyCluster) -> None:
    assert valkey_cluster.url.count(",") == 2
    with RedisCluster(host="127.0.0.1", port=valkey_cluster.nodes[0].port) as client:
        owners = set()
        for name in "abcdefgh":
            client.set(f"tm:{{{name}}}:key", name, ex=60)
            assert client.get(f"tm:{{{name}}}:key") == name.encode()
            owners.add(valkey_cluster.node_of(f"tm:{{{name}}}:key").port)
    assert len(owners) > 1
    with (
        valkey_cluster.node_of("a").client() as direct,
        pytest.raises(redis.ResponseError, match="same slot"),
    ):
        direct.execute_command("MGET", "a", "b", "c")


@pytest.mark.slow
def test_a_killed_primary_is_replaced_without_losing_data(sentinel_group: SentinelGroup) -> None:
    sentinel = Sentinel([("127.0.0.1", s.port) for s in sentinel_group.sentinels])
    before = sentinel_group.primary
    with before.client() as client:
        client.set("kept", 1)
        client.wait(1, 2_000)
    after = sentinel_group.fail_over()
    assert after is not before
    # A sentinel may name it before it has a message of it.
    wait_until(
        lambda: bool(sentinel.discover_master("main")[1] == after.port),
        "the new primary, by the library's search",
    )
    with after.client() as client:
        assert client.get("kept") == b"1"
        client.set("new", 2)
    before.start()

    def follows() -> bool:
        with before.client() as client:
            return bool(client.execute_command("ROLE")[0] == b"slave")

    wait_until(follows, "the old primary's new role")


@pytest.mark.slow
def test_a_cluster_s_replica_takes_over() -> None:
    with ValkeyCluster(num_primaries=3, num_replicas=1) as cluster:
        key = "tm:{q}:key"
        old = cluster.node_of(key)
        with old.client() as client:
            client.set(key, 1)
            client.wait(1, 2_000)
        old.kill()
        wait_until(lambda: cluster.node_of(key) is not old, "a new owner")
        with cluster.node_of(key).client() as client:
            wait_until(lambda: client.get(key) == b"1", "the value at the new owner")
