"""Recomputes the state of scheduler and KV manager from scratch and compares.

It reads the private fields of both: it tests their bookkeeping, not what they do for a caller.
"""

from __future__ import annotations

from collections import Counter

from tokenmill_worker.engines.own.kv.block_pool import BlockPool
from tokenmill_worker.engines.own.kv.host_pool import HostPool
from tokenmill_worker.engines.own.kv.manager import KVManager
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.scheduler.preemption import is_preemptible
from tokenmill_worker.engines.own.scheduler.state import (
    DECODING,
    FINISHED,
    OFFLOADED,
    PREFILLING,
    WAITING,
    SchedulerState,
)
from tokenmill_worker.engines.own.sequence import Sequence


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
    _check_pool(state.kv, sequences)
    _check_host(state, sequences)


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
    everywhere = sorted([*host._free, *host._held, *host._hash_of, *host._leaving])
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
    num_open = sum(1 for entry in state.deadlines._heap if entry[2].status is not FINISHED)
    _require(state.deadlines._num_open == num_open, "the count of open deadlines is off")
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
    for group, (table, size) in enumerate(zip(s.block_tables, kv.block_sizes, strict=True)):
        needed = -(-s.num_computed_tokens // size)
        _require(len(table) >= needed, f"{name}: table of group {group} is too short")
        first = kv.first_visible(group, s.num_committed_tokens)
        _require(all(table[first:]), f"{name}: a visible block of group {group} is gone")
        _require(not any(table[:first]), f"{name}: group {group} keeps blocks that left its window")
    tables = zip(s.block_tables, kv.block_sizes, strict=True)
    _require(
        s.num_slots == min(len(table) * size for table, size in tables), f"{name}: num_slots is off"
    )


def _check_pool(kv: KVManager, sequences: list[Sequence]) -> None:
    pool = kv.pool
    holders: Counter[int] = Counter()
    groups: dict[int, int] = {}  # block → the group that holds it
    for sequence in sequences:
        for group, table in enumerate(sequence.block_tables):
            held = [block for block in table if block]
            holders.update(held)
            _require(
                all(groups.setdefault(block, group) == group for block in held),
                "a block is held by two groups",
            )
    holders.update(block for _, block in kv._deferred)
    free = free_blocks(pool)
    _require(len(free) == pool.num_free == len(set(free)), "the free list and its count differ")
    _require(0 not in free and 0 not in holders, "block 0 is in use")
    for block in range(1, pool.num_blocks):
        _require(pool.refs[block] == holders[block], f"block {block} has a wrong reference count")
    _require(
        set(free) == {b for b in range(1, pool.num_blocks) if not pool.refs[b]}, "blocks are lost"
    )
    hashed = {content: block for block, content in enumerate(pool.hashes) if content is not None}
    _require(hashed == pool.cached, "hashes and cache differ")
    _require(
        pool.num_free_cached == sum(1 for b in free if pool.hashes[b] is not None),
        "findable is off",
    )
    for block, owner in pool.reserved.items():
        _require(pool.refs[block] == 1, f"the reserved block {block} is shared or free")
        _require(
            any(block in table for table in owner.block_tables),
            f"the reserved block {block} outlives its owner",
        )


def _check_host(state: SchedulerState, sequences: list[Sequence]) -> None:
    host = state.kv.tier.pool
    check_host_pool(host)
    held = [block for s in sequences for table in s.host_tables for block in table if block >= 0]
    held += [block for copies in state.in_flight.values() for block in copies.host_sources]
    held += [block for block, _ in state.kv.tier.reading.values()]
    _require(sorted(held) == held_blocks(host), "host blocks are lost")
