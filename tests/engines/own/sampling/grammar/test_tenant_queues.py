"""Tenants take turns, and leave a place to the others, whatever each has waiting."""

from tokenmill_worker.engines.own.sampling.grammar.tenant_queues import TenantQueues


def taken(queues: TenantQueues[int]) -> list[tuple[str, int]]:
    found = []
    while (turn := queues.take()) is not None:
        found.append(turn)
    return found


def test_tenants_take_turns_regardless_of_their_backlogs() -> None:
    queues: TenantQueues[int] = TenantQueues(10, 10)
    for i in range(4):
        queues.add("a", i)
    queues.add("b", 4)
    queues.add("c", 5)
    queues.add("b", 6)
    assert taken(queues) == [
        ("a", 0), ("b", 4), ("c", 5), ("a", 1), ("b", 6), ("a", 2), ("a", 3)
    ]  # fmt: skip


def test_a_tenant_gets_at_most_its_places_and_one_stays_for_others() -> None:
    queues: TenantQueues[int] = TenantQueues(3, 2)
    for i in range(3):
        queues.add("a", i)
    assert taken(queues) == [("a", 0), ("a", 1)]
    queues.add("b", 3)
    queues.add("b", 4)
    assert taken(queues) == [("b", 3)]
    queues.free("a")
    assert taken(queues) == [("a", 2)]
    queues.free("b")
    assert taken(queues) == [("b", 4)]
