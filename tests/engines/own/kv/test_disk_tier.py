"""Tests of the third tier between the engine's thread and the disk's: no call waits, and every host
block comes back.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.own.scheduler.integrity import check_host_pool
from tests.engines.own.scheduler.loop import Clock, make_cache, make_sequence
from tokenmill_worker.engines.own.config.engine_config import GIB
from tokenmill_worker.engines.own.kv.block_files import BlockFiles
from tokenmill_worker.engines.own.kv.disk_tier import DiskTier
from tokenmill_worker.engines.own.kv.manager import KVManager
from tokenmill_worker.engines.own.kv.read_ahead import PAUSE_S, READ_WAIT_S, STALL_S, read_ahead

SIZE = 64
PROMPT = list(range(100, 200))  # 25 blocks of 4 tokens, of which 24 may be cached


class SlowFiles(BlockFiles):
    """Files whose reads wait until the test lets them go on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may_read = threading.Event()
        self.may_read.set()
        self.may_write = threading.Event()
        self.may_write.set()

    def read(self, key: bytes, into: Any) -> bool:
        self.may_read.wait(30)
        return super().read(key, into)

    def write(self, key: bytes, block: Any) -> bool:
        self.may_write.wait(30)
        return super().write(key, block)


class Setup:
    """A KV manager above a folder; the host blocks are memory that the test writes."""

    def __init__(self, folder: Path, num_host_blocks: int = 64) -> None:
        self.clock = Clock()
        self.memory = np.zeros((num_host_blocks, SIZE), np.uint8)
        self.files = SlowFiles(folder, b"m" * 32, SIZE, GIB)
        self.disk = DiskTier(self.files, self.memory, clock=self.clock)
        cache = make_cache(64, num_host_blocks=num_host_blocks)
        self.kv = KVManager(
            cache, model_key=self.disk.model_key, max_chunk=64, safety_margin=0.0, disk=self.disk
        )

    def poll_until(self, is_met: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not is_met():
            assert time.monotonic() < end
            self.disk.poll()
            time.sleep(0.001)

    def compute(self, prompt: list[int]) -> None:
        """Run a prompt as a step would, and let its blocks be written."""
        kv, sequence = self.kv, make_sequence("a", prompt)
        if prompt:
            assert kv.allocate(sequence, kv.find(sequence), None)
            kv.advance(sequence, len(prompt))
            kv.free(sequence, in_flight=False)
        self.copy()
        while kv.tier.has_saves:
            self.copy()

    def copy(self) -> None:
        """Make the planned copies: a host block is filled with its key."""
        tier = self.kv.tier
        tier.plan_saves(self.kv.pool)
        copies = tier.take_copies()
        for key in copies.kept:
            block = tier.pool.find(key)
            assert block is not None
            self.memory[block] = np.frombuffer(key * 2, np.uint8)
        tier.commit(copies, self.kv.pool)

    def check(self) -> None:
        host = self.kv.tier.pool
        check_host_pool(host)
        assert not self.kv.tier.reading
        assert not host._held
        assert not host._pins
        assert not host._leaving


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    made: list[Setup] = []

    def make_one(**settings: int) -> Setup:
        made.append(Setup(tmp_path, **settings))
        return made[-1]

    yield make_one
    for setup in made:
        setup.files.may_read.set()
        setup.files.may_write.set()
        setup.disk.close()


@pytest.fixture
def filled(make: Callable[..., Setup]) -> Callable[..., Setup]:
    """Return `make` above a folder that has the blocks of PROMPT."""
    first = make()
    first.compute(PROMPT)
    first.poll_until(lambda: not first.disk.num_unwritten)
    assert first.files.num_written == 25
    first.check()
    return make


def test_filled_blocks_are_written_and_leave_the_host_pool(filled: Callable[..., Setup]) -> None:
    """They are on the device still; the host pool is for what the device has not."""
    first = filled()
    first.compute([1] * 64)
    first.poll_until(lambda: not first.disk.num_unwritten)
    assert not first.kv.tier.pool._kept


def test_a_prompt_s_blocks_are_read_before_it_is_scheduled(filled: Callable[..., Setup]) -> None:
    setup = filled()
    sequence = make_sequence("b", PROMPT)
    reads = read_ahead(setup.kv, [sequence])
    assert reads is not None
    setup.poll_until(reads.has_ended)
    assert setup.kv.find(sequence).num_tokens == 96
    assert (setup.disk.num_read, setup.disk.num_missed) == (24, 0)
    for key, block in setup.kv.tier.pool._kept.items():
        assert setup.memory[block].tobytes() == key * 2
    setup.check()


def test_a_prompt_is_read_as_far_as_it_is_there(filled: Callable[..., Setup]) -> None:
    setup = filled()
    sequence = make_sequence("b", PROMPT[:50] + [7] * 50)
    reads = read_ahead(setup.kv, [sequence])
    assert reads is not None
    setup.poll_until(reads.has_ended)
    assert setup.kv.find(sequence).num_tokens == 48
    assert (setup.disk.num_read, setup.disk.num_missed) == (12, 12)


def test_a_short_or_cached_prompt_does_not_ask_the_disk(filled: Callable[..., Setup]) -> None:
    setup = filled()
    assert read_ahead(setup.kv, [make_sequence("b", PROMPT[:60])]) is None
    setup.compute(PROMPT)
    assert read_ahead(setup.kv, [make_sequence("c", PROMPT)]) is None


def test_requests_for_one_prompt_read_it_once(filled: Callable[..., Setup]) -> None:
    setup = filled()
    setup.files.may_read.clear()
    waiting = [read_ahead(setup.kv, [make_sequence(name, PROMPT)]) for name in "abc"]
    setup.poll_until(lambda: len(setup.kv.tier.reading) == 24)
    setup.files.may_read.set()
    setup.poll_until(lambda: all(one is not None and one.has_ended() for one in waiting))
    assert setup.disk.num_read == 24
    setup.check()


def test_a_disk_that_gives_a_block_now_and_then_is_waited_for_up_to_its_limit(
    filled: Callable[..., Setup],
) -> None:
    setup = filled()
    setup.files.may_read.clear()
    reads = read_ahead(setup.kv, [make_sequence("b", PROMPT)])
    assert reads is not None
    setup.poll_until(lambda: len(setup.kv.tier.reading) == 24)
    waited = 0.0
    while not reads.has_ended():
        reads._was_read()  # of 24
        setup.clock.now += 0.9 * STALL_S
        waited += 0.9 * STALL_S
    assert READ_WAIT_S <= waited <= READ_WAIT_S + STALL_S
    setup.files.may_read.set()
    setup.poll_until(lambda: not setup.kv.tier.reading)
    setup.check()


def test_a_disk_that_hangs_is_waited_for_briefly_and_left_alone(
    filled: Callable[..., Setup],
) -> None:
    setup = filled()
    setup.files.may_read.clear()
    reads = read_ahead(setup.kv, [make_sequence("b", PROMPT)])
    assert reads is not None
    setup.poll_until(lambda: len(setup.kv.tier.reading) == 24)
    assert not reads.has_ended()
    setup.clock.now += STALL_S
    assert reads.has_ended()
    assert setup.files.failures["slow"] == 1
    assert read_ahead(setup.kv, [make_sequence("c", PROMPT)]) is None
    setup.files.may_read.set()  # what comes too late is kept on the host
    setup.poll_until(lambda: not setup.kv.tier.reading)
    assert reads.has_ended()
    setup.check()
    setup.kv.tier.pool.forget_all()
    setup.clock.now += PAUSE_S
    assert read_ahead(setup.kv, [make_sequence("c", PROMPT)]) is not None


def test_a_host_pool_that_is_too_small_takes_a_part(filled: Callable[..., Setup]) -> None:
    setup = filled(num_host_blocks=10)
    sequence = make_sequence("b", PROMPT)
    reads = read_ahead(setup.kv, [sequence])
    assert reads is not None
    setup.poll_until(reads.has_ended)
    assert setup.kv.find(sequence).num_tokens == 40
    setup.check()


def test_a_disk_that_writes_slowly_gets_fewer_blocks_and_keeps_half_of_the_host_pool_free(
    make: Callable[..., Setup],
) -> None:
    setup = make(num_host_blocks=20)
    setup.files.may_write.clear()
    setup.compute(PROMPT)
    assert setup.disk.num_unwritten == 10
    assert setup.kv.tier.pool.num_free == 10
    for _ in range(3):  # every block of the device is taken, so the others are evicted
        setup.compute([random.randrange(1000) for _ in range(4 * 63)])
    assert setup.files.failures["busy"] > 0
    assert setup.kv.tier.pool.num_free == 10
    setup.files.may_write.set()
    setup.poll_until(lambda: not setup.disk.num_unwritten)
    setup.check()


def test_blocks_wait_on_the_device_for_a_disk_that_writes_slowly(
    make: Callable[..., Setup],
) -> None:
    setup = make(num_host_blocks=20)
    setup.compute(PROMPT)
    while setup.kv.tier.has_unsaved or setup.disk.num_unwritten:
        setup.poll_until(lambda: not setup.disk.num_unwritten)
        setup.compute([])
    assert setup.files.num_written == 25
    assert not setup.files.failures.total()


def test_blocks_of_changed_weights_are_neither_read_nor_written(
    filled: Callable[..., Setup],
) -> None:
    setup = filled()
    setup.files.may_read.clear()
    reads = read_ahead(setup.kv, [make_sequence("b", PROMPT)])
    assert reads is not None
    setup.poll_until(lambda: len(setup.kv.tier.reading) == 24)
    setup.kv.reset_prefix_cache()
    setup.files.may_read.set()
    setup.poll_until(reads.has_ended)
    assert not setup.kv.tier.pool._kept
    assert read_ahead(setup.kv, [make_sequence("c", PROMPT)]) is None
    setup.compute(PROMPT)
    assert not setup.disk.num_unwritten
    assert not setup.kv.tier.has_unsaved
    setup.check()


def test_a_block_whose_hash_is_dropped_while_it_is_written_is_not_used_again_before(
    make: Callable[..., Setup],
) -> None:
    setup = make(num_host_blocks=60)
    setup.files.may_write.clear()
    setup.compute(PROMPT)
    pool = setup.kv.tier.pool
    written = set(pool._pins)
    setup.kv.reset_prefix_cache()
    taken = {pool.take() for _ in range(60)} - {None}
    assert len(taken) == 35
    assert not taken & written
    for block in taken:
        pool.give_back(block)  # type: ignore[arg-type]
    setup.files.may_write.set()
    setup.poll_until(lambda: not setup.disk.num_unwritten)
    setup.check()


def test_a_failure_that_nobody_foresaw_gives_the_block_back(make: Callable[..., Setup]) -> None:
    setup = make()

    def fail(*_: object) -> bool:
        raise RuntimeError("a fault of the test")

    setup.files.write = fail  # type: ignore[assignment, method-assign]
    setup.compute(PROMPT)
    setup.poll_until(lambda: not setup.disk.num_unwritten)
    assert setup.files.failures["io"] == 25
    setup.check()
