"""Turns of the tenants: one after the other, and a place that no single tenant can hold."""

from tokenmill_worker.engine.sampling.grammar.turns import Turns


def taken(turns: Turns[int]) -> list[tuple[str, int]]:
    found = []
    while (turn := turns.take()) is not None:
        found.append(turn)
    return found


def test_tenants_take_turns_whatever_each_has_waiting() -> None:
    turns: Turns[int] = Turns(10, 10)
    for i in range(4):
        turns.add("a", i)
    turns.add("b", 4)
    turns.add("c", 5)
    turns.add("b", 6)
    assert taken(turns) == [
        ("a", 0), ("b", 4), ("c", 5), ("a", 1), ("b", 6), ("a", 2), ("a", 3)
    ]  # fmt: skip


def test_a_tenant_holds_its_places_and_leaves_one_to_others() -> None:
    turns: Turns[int] = Turns(3, 2)
    for i in range(3):
        turns.add("a", i)
    assert taken(turns) == [("a", 0), ("a", 1)]
    turns.add("b", 3)
    turns.add("b", 4)
    assert taken(turns) == [("b", 3)]
    turns.free("a")
    assert taken(turns) == [("a", 2)]
    turns.free("b")
    assert taken(turns) == [("b", 4)]


def test_what_waits_for_a_tenant_is_dropped_alone() -> None:
    turns: Turns[int] = Turns(1, 1)
    turns.add("a", 0)
    turns.add("b", 1)
    assert turns.drop("a") == [0]
    assert turns.drop("a") == []
    assert turns.tenants() == ["b"]
    assert taken(turns) == [("b", 1)]
