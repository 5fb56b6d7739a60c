"""Recomputes the state of scheduler and KV manager from scratch and compares.

It reads the private fields of both: it tests their bookkeeping, not what they do for a caller.
"""

from __future__ import annotations

from collections import Counter

from tokenmill_worker.engine.kv.block_pool import BlockPool
from tokenmill_worker.engine.kv.host_pool import HostPool
from tokenmill_worker.engine.kv.manager import KVManager
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.scheduler.preemption import is_preemptible
from tokenmill_worker.engine.scheduler.state import (
    DECODING,
    FINISHED,
    OFFLOADED,
    PREFILLING,
    WAITING,
    SchedulerState,
)
from tokenmill_worker.engine.sequence import Sequence


def check_integrity(scheduler: Scheduler) -> None:
    """Raise AssertionError, with one sentence, at the first contradiction."""
    state = scheduler._state
    _require(
        scheduler._planned_at.keys() <= state.in_flight.keys(),
        "a step that is not in flight has a start time",
    )
    _check_lists(state)
    sequences = list(state.entries)
    for sequence in sequences:
        _check_sequence(state.kv, sequence)
    for group in range(len(state.kv.pools)):
        _check_pool(state.kv, group, sequences)
        _check_host(state, group, sequences)


def free_blocks(pool: BlockPool) -> list[int]:
    """Return the free blocks in the order of allocation."""
    found, block = [], pool._next[0]
    while block:
        found.append(block)
        block = pool._next[block]
    return found


def held_blocks(host: HostPool) -> list[int]:
    """Return the host blocks that preempted sequences hold."""
    return sorted(host._held)


def check_host_pool(host: HostPool) -> None:
    """Raise AssertionError when a block is lost or in two places."""
    everywhere = sorted([*host._free, *host._held, *host._hash_of])
    _require(
        everywhere == list(range(host.num_blocks)),
        f"host blocks are lost or in two places: {everywhere}",
    )
    _require(
        {block: content for content, block in host._kept.items()} == host._hash_of,
        "the host pool's two maps of hashes differ",
    )


def _require(ok: bool, sentence: str) -> None:
    if not ok:
        raise AssertionError(sentence)


def _check_lists(state: SchedulerState) -> None:
    sequences = list(state.entries)
    by_status = Counter(sequence.status for sequence in sequences)
    _require(by_status[FINISHED] == 0, "a finished sequence still has an entry")
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
    waiting = sum(1 for entry in state.entries.values() if entry.queued)
    _require(
        len(state.queue) == waiting == by_status[WAITING] + by_status[OFFLOADED],
        f"queue {len(state.queue)}, marked {waiting}, "
        f"by state {by_status[WAITING]} + {by_status[OFFLOADED]}",
    )
    _require(state.num_offloaded == by_status[OFFLOADED], "the count of offloaded sequences is off")
    preemptible = sum(map(is_preemptible, [*state.decoding, *state.prefilling]))
    _require(state.num_preemptible == preemptible, "the count of preemptible sequences is off")
    _require(state.num_running <= state.config.max_num_seqs, "more sequences run than may")
    known = [sequence for siblings in state.requests.values() for sequence in siblings]
    _require(
        set(known) == set(sequences) and len(known) == len(sequences), "requests and entries differ"
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
    holders.update(block for _, of, block in kv._deferred if of == group)
    free = free_blocks(pool)
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
        pool.num_free_cached == sum(1 for b in free if pool.hashes[b] is not None),
        f"group {group}: findable is off",
    )
    for block, owner in pool.reserved.items():
        _require(
            pool.refs[block] == 1, f"group {group}: the reserved block {block} is shared or free"
        )
        held = owner.block_tables[group] if owner.block_tables else []
        _require(block in held, f"group {group}: the reserved block {block} outlives its owner")


def _check_host(state: SchedulerState, group: int, sequences: list[Sequence]) -> None:
    host = state.kv.tier.pools[group]
    check_host_pool(host)
    held = [
        block for s in sequences if s.host_tables for block in s.host_tables[group] if block >= 0
    ]
    held += [
        block
        for copies in state.in_flight.values()
        for of, block in copies.host_sources
        if of == group
    ]
    _require(sorted(held) == held_blocks(host), f"group {group}: host blocks are lost")
