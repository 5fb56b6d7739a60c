"""Runs one target over many inputs and says what came of it: with atheris (coverage-guided) or by
itself (seeded).

A hang or a memory bomb is a finding too: an input that takes longer than LONGEST_S ends the
process with a traceback, one that needs more than MOST_MEMORY is a MemoryError where it asks for
it.
"""

from __future__ import annotations

import faulthandler
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from tests.fuzz.mutation import MAX_BYTES, mutate
from tests.fuzz.targets import Target

LONGEST_S: Final = 20.0
MOST_MEMORY: Final = 6 << 30  # of address space; imported libraries take most of it


class Finding(Exception):
    """An input ended with something undocumented; it is the cause, `data` the input."""

    def __init__(self, target: str, data: bytes) -> None:
        super().__init__(f"{target}: {data[:200]!r}{' …' if len(data) > 200 else ''}")
        self.data = data


class Report(msgspec.Struct, kw_only=True):
    """The figures of one fuzzing run."""

    target: str
    guided: bool
    inputs: int = 0
    read: int = 0
    refused: int = 0
    slowest_ms: float = 0.0
    seconds: float = 0.0


class Counter:
    """Calls the target and counts how its inputs end."""

    def __init__(self, target: Target, *, guided: bool) -> None:
        self.target = target
        self.report = Report(target=target.name, guided=guided)
        self._since = time.monotonic()

    def __call__(self, data: bytes) -> None:
        """Raises Finding."""
        started = time.perf_counter()
        try:
            was_read = self.target.try_one(data)
        except Exception as error:
            raise Finding(self.target.name, data) from error
        report = self.report
        report.inputs += 1
        report.read += was_read
        report.refused += not was_read
        report.slowest_ms = max(report.slowest_ms, (time.perf_counter() - started) * 1e3)

    def ended(self) -> Report:
        self.report.seconds = time.monotonic() - self._since
        return self.report


def run_seeded(target: Target, inputs: int, seed: int) -> Report:
    """Fuzz without coverage: each input is a seed, or a seed or earlier input with some changes.

    Raises Finding.
    """
    chance = random.Random(f"{target.name}/{seed}")
    counter = Counter(target, guided=False)
    pool = list(target.seeds)
    try:
        for number in range(inputs):
            if number % 256 == 0:
                faulthandler.dump_traceback_later(LONGEST_S + 10, exit=True)
            start = chance.choice(pool if chance.random() < 0.2 else target.seeds)
            data = (
                mutate(start, chance, target.seeds)
                if number >= len(target.seeds)
                else target.seeds[number]
            )
            counter(data)
            if number % 16 == 0:  # walk away from the seeds, but not for ever
                if len(pool) > 64 + len(target.seeds):
                    del pool[len(target.seeds) :]
                pool.append(data)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return counter.ended()


def run_guided(target: Target, inputs: int, seed: int, on_end: Callable[[Report], None]) -> None:
    """Fuzz with atheris.

    It ends the process, so `on_end` is called before the last input returns.
    """
    import atheris

    chance = random.Random(f"{target.name}/{seed}")
    counter = Counter(target, guided=True)

    def one(data: bytes) -> None:
        counter(data)
        if counter.report.inputs == inputs:
            on_end(counter.ended())

    def changed(data: bytes, max_size: int, _seed: int) -> bytes:
        if not data or chance.random() < 0.3:
            data = chance.choice(target.seeds)
        if chance.random() < 0.25:
            return bytes(atheris.Mutate(data, max_size))
        return mutate(data, chance, target.seeds)[:max_size]

    options = [
        f"-runs={inputs}",
        f"-seed={seed}",
        f"-max_len={MAX_BYTES}",
        f"-timeout={LONGEST_S:.0f}",
    ]
    options += ["-rss_limit_mb=3072", "-verbosity=0", "-print_final_stats=0", "-detect_leaks=0"]
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=changed, internal_libfuzzer=True)
    atheris.Fuzz()


def limit_memory() -> None:
    """Limit the memory of the process that fuzzes. Call it before the first input."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
