"""Recomputes the state of scheduler and KV manager from scratch and compares; for tests and idle time."""

from __future__ import annotations

from collections import Counter

from tokenmill_worker.engine.kv.manager import KVManager
from tokenmill_worker.engine.scheduler.preemption import yields_to_urgent
from tokenmill_worker.engine.scheduler.state import (
    DECODING,
    FINISHED,
    OFFLOADED,
    PREFILLING,
    WAITING,
    State,
)
from tokenmill_worker.engine.sequence import Sequence


def check(state: State) -> None:
    """Raise AssertionError, with one sentence, at the first contradiction."""
    _check_lists(state)
    sequences = list(state.places)
    for sequence in sequences:
        _check_sequence(state.kv, sequence)
    for group in range(len(state.kv.pools)):
        _check_pool(state.kv, group, sequences)
        _check_host(state, group, sequences)


def _require(ok: bool, sentence: str) -> None:
    if not ok:
        raise AssertionError(sentence)


def _check_lists(state: State) -> None:
    sequences = list(state.places)
    by_status = Counter(sequence.status for sequence in sequences)
    _require(by_status[FINISHED] == 0, "a finished sequence still has a place")
    _require(all(s.status is DECODING for s in state.decoding), "the decoding list holds others")
    _require(
        all(s.status is PREFILLING for s in state.prefilling), "the prefilling list holds others"
    )
    _require(
        len(set(state.decoding)) == len(state.decoding) == by_status[DECODING],
        "decoding list and states differ",
    )
    _require(
        len(set(state.prefilling)) == len(state.prefilling) == by_status[PREFILLING],
        "prefilling and states differ",
    )
    waiting = sum(1 for place in state.places.values() if place.queued)
    _require(
        len(state.queue) == waiting == by_status[WAITING] + by_status[OFFLOADED],
        f"queue {len(state.queue)}, marked {waiting}, by state {by_status[WAITING]} + {by_status[OFFLOADED]}",
    )
    _require(state.num_offloaded == by_status[OFFLOADED], "the count of offloaded sequences is off")
    yielding = sum(map(yields_to_urgent, [*state.decoding, *state.prefilling]))
    _require(
        state.num_yielding == yielding, "the count of sequences that yield to urgent ones is off"
    )
    _require(state.num_running <= state.config.max_num_seqs, "more sequences run than may")
    known = [sequence for siblings in state.requests.values() for sequence in siblings]
    _require(
        set(known) == set(sequences) and len(known) == len(sequences), "requests and places differ"
    )
    if not state.in_flight:
        _require(not state.kv.has_deferred, "blocks are deferred and nothing is in flight")


def _check_sequence(kv: KVManager, s: Sequence) -> None:
    name = f"{s.request_id}/{s.choice} ({s.status.value})"
    _require(
        0 <= s.num_committed_tokens <= s.num_computed_tokens,
        f"{name}: committed runs ahead of computed",
    )
    _require(s.num_committed_tokens <= s.num_tokens, f"{name}: more is committed than it holds")
    _require(
        len(s.block_hashes) <= s.num_tokens // kv.block_size,
        f"{name}: hashes of blocks that are not full",
    )
    if s.status in (WAITING, OFFLOADED):
        _require(not any(s.block_tables), f"{name}: holds device blocks")
        _require(s.num_inflight == 0, f"{name}: has tokens in flight")
        _require(
            (s.status is OFFLOADED) == any(s.host_tables), f"{name}: host blocks and state differ"
        )
        _require(
            s.status is OFFLOADED or s.num_computed_tokens == 0,
            f"{name}: waits with computed tokens",
        )
        return
    _require(not s.host_tables, f"{name}: runs and holds host blocks")
    needed = -(-s.num_computed_tokens // kv.block_size)
    for group, table in enumerate(s.block_tables):
        _require(len(table) >= needed, f"{name}: table of group {group} is too short")
        first = kv.first_visible(group, s.num_committed_tokens)
        _require(all(table[first:]), f"{name}: a visible block of group {group} is gone")
        _require(not any(table[:first]), f"{name}: group {group} keeps blocks that left its window")
    _require(
        s.num_slots == min(map(len, s.block_tables)) * kv.block_size, f"{name}: num_slots is off"
    )


def _check_pool(kv: KVManager, group: int, sequences: list[Sequence]) -> None:
    pool = kv.pools[group]
    holders: Counter[int] = Counter()
    for sequence in sequences:
        if sequence.block_tables:
            holders.update(block for block in sequence.block_tables[group] if block)
    holders.update(block for of, block in kv.deferred_blocks() if of == group)
    free = pool.free_blocks()
    _require(
        len(free) == pool.num_free == len(set(free)),
        f"group {group}: the free list and its count differ",
    )
    _require(0 not in free and 0 not in holders, f"group {group}: block 0 is in use")
    for block in range(1, pool.num_blocks):
        _require(
            pool.refs[block] == holders[block],
            f"group {group}: block {block} has a wrong reference count",
        )
    _require(
        set(free) == {b for b in range(1, pool.num_blocks) if not pool.refs[b]},
        f"group {group}: blocks are lost",
    )
    hashed = {content: block for block, content in enumerate(pool.hashes) if content is not None}
    _require(hashed == pool.cached, f"group {group}: hashes and cache differ")
    _require(
        pool.num_findable == sum(1 for b in free if pool.hashes[b] is not None),
        f"group {group}: findable is off",
    )
    for block, owner in pool.fenced.items():
        _require(
            pool.refs[block] == 1, f"group {group}: the fenced block {block} is shared or free"
        )
        held = owner.block_tables[group] if owner.block_tables else []
        _require(block in held, f"group {group}: the fence of block {block} outlives its owner")


def _check_host(state: State, group: int, sequences: list[Sequence]) -> None:
    host = state.kv.tier.pools[group]
    host.check()
    held = [
        block for s in sequences if s.host_tables for block in s.host_tables[group] if block >= 0
    ]
    held += [
        block for moves in state.in_flight.values() for of, block in moves.leaving if of == group
    ]
    _require(sorted(held) == host.held_blocks(), f"group {group}: host blocks are lost")
