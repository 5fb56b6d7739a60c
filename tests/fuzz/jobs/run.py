"""`ops/fuzz jobs --count N --seed S`: submits drawn jobs to a real worker and prints what became of
them. The exit status is 1 if anything went wrong that no input may cause.

A job may be refused, end in any final state, and fail with a code that names its own fault. No
worker may end, no engine may be replaced, no job may stay without an end or end twice, and no
traceback may be logged.
"""

# ruff: noqa: T201 - a command: it prints
from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.fuzz.jobs.cases import Case
from tests.fuzz.jobs.producer import FuzzProducer, Submitted
from tests.fuzz.jobs.service import EndRow, FirstTokens, FuzzedService

PATIENCE_S: Final = 90.0  # a run ends when no job has ended for so long
# The codes of a job whose own request, or whose own limit, is the reason
OWN_FAULTS: Final = frozenset(
    {
        "", "invalid_request", "context_length_exceeded", "model_not_found", "schema_violation",
        "deadline_exceeded", "job_id_taken",
    }
)  # fmt: skip
MOST_SHOWN: Final = 25


@dataclass(slots=True)
class Outcome:
    """Everything that a run has found."""

    submitted: Submitted
    rows: dict[str, EndRow]
    billed: list[str]
    stuck: dict[str, str]  # job → its state in Redis
    deaths: list[str]
    num_replaced: int
    log: str
    undisturbed: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def problems(self) -> Iterator[str]:
        """Yield each thing that no input may cause, with the job where one is known."""
        cases = self.submitted.cases
        yield from (f"the worker ended, {words}" for words in self.deaths)
        if self.num_replaced:
            yield f"{self.num_replaced} engines were replaced"
        yield from self.submitted.findings
        for job, state in self.stuck.items():
            yield f"stuck ({state}): {cases[job]}"
        for job, row in self.rows.items():
            if row.error_code not in OWN_FAULTS or row.state == "dead":
                shown = cases.get(job, job)
                yield f"{row.state}, {row.error_code} ({row.error_message[:300]}): {shown}"
            elif job not in cases:
                yield f"job {job!r} has a row and was never accepted"
        yield from self._misbilled()
        yield from self._misread()
        for found in re.finditer("Traceback", self.log):
            yield f"the log has a traceback: {self.log[found.start() - 300 : found.start() + 2000]}"

    def _misbilled(self) -> Iterator[str]:
        for job, count in Counter(self.billed).items():
            if count > 1 or job not in self.rows:
                yield f"job {job!r} has {count} rows of usage"
        for job in self.rows.keys() - set(self.billed):
            yield f"job {job!r} has no row of usage"

    def _misread(self) -> Iterator[str]:
        for job, received in self.submitted.received.items():
            row, case = self.rows.get(job), self.submitted.cases[job]
            if row is None:
                continue  # it is stuck, and told already
            if received.problems or received.status != row.state:
                yield f"a reader received {received.status}, {received.problems}: {case}"
            elif received.text != row.text:
                yield f"a reader received {received.text!r}, SQL has {row.text!r}: {case}"

    def summary(self) -> str:
        submitted, rows = self.submitted, self.rows
        refused = submitted.refused
        ends = Counter(row.state for row in rows.values())
        codes = Counter(row.error_code for row in rows.values() if row.error_code)
        lines = [
            f"accepted {len(submitted.cases):,} ({_listed(submitted.by_way)}), refused "
            f"{refused.total():,} ({_listed(refused)}), in {self.seconds:.0f} s",
            f"ended {len(rows):,}: {_listed(ends)}; codes: {_listed(codes)}",
            f"worker deaths {len(self.deaths)}, engines replaced {self.num_replaced}, stuck jobs "
            f"{len(self.stuck)}, tracebacks {self.log.count('Traceback')}, readers "
            f"{len(submitted.received):,}",
        ]
        if len(self.undisturbed) > 1 and len(self.beside) > 1:
            lines.append(_latency(self.undisturbed, self.beside))
        return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common()) or "none"


def _latency(undisturbed: list[float], beside: list[float]) -> str:
    alone, busy = (statistics.quantiles(times, n=100) for times in (undisturbed, beside))
    return (
        f"interactive first token: undisturbed p50 {alone[49]:.1f}, p99 {alone[98]:.1f} ms "
        f"({len(undisturbed)}); beside the fuzz p50 {busy[49]:.1f}, p99 {busy[98]:.1f} ms "
        f"({len(beside)}); p99 {busy[98] / alone[98]:.1f} ×"
    )


async def fuzz(
    cases: list[Case], *, rate: float, probe_s: float, model: str = "", folder: Path
) -> Outcome:
    """Run the cases against a service of their own. Without `probe_s` there is no probe."""
    service = FuzzedService(folder, model)
    async with service:
        producer = FuzzProducer(service.url, "fuzz", service.database, rate)
        tokens = FirstTokens(service)
        started = time.monotonic()
        try:
            if probe_s:
                async with tokens:
                    await asyncio.sleep(probe_s)
                    tokens.fuzz_begins()
                    started = time.monotonic()
                    await _submit(cases, producer, service)
            else:
                await _submit(cases, producer, service)
            stuck = await _wait_for_ends(producer, service)
            await producer.wait_for_readers(10.0)
        finally:
            await producer.close()
        return Outcome(
            producer.submitted,
            await asyncio.to_thread(service.rows),
            await asyncio.to_thread(service.billed),
            stuck,
            service.deaths,
            service.num_replaced,
            service.log,
            tokens.undisturbed,
            tokens.beside,
            time.monotonic() - started,
        )


async def _submit(cases: list[Case], producer: FuzzProducer, service: FuzzedService) -> None:
    printing = asyncio.create_task(_print_progress(producer, service))
    try:
        await producer.submit_all(cases)
    finally:
        printing.cancel()


async def _print_progress(producer: FuzzProducer, service: FuzzedService) -> None:
    while True:
        await asyncio.sleep(30)
        print(
            f"fuzz: {len(producer.submitted.cases):,} accepted, "
            f"{producer.submitted.refused.total():,} refused, {len(service.deaths)} deaths, "
            f"{service.num_replaced} engines replaced",
            flush=True,
        )


async def _wait_for_ends(producer: FuzzProducer, service: FuzzedService) -> dict[str, str]:
    """Wait until every accepted job has a row. Returns those without one.

    What waits for a time that is far away is cancelled first.
    """
    jobs = set(producer.submitted.cases)
    has_cancelled, before, since = False, -1, time.monotonic()
    while not service.has_given_up:
        rows = await asyncio.to_thread(service.rows)
        left = sorted(jobs - rows.keys())
        if not left:
            return {}
        if len(rows) != before:
            before, since = len(rows), time.monotonic()
        elif not has_cancelled and await producer.num_waiting() == 0:
            for job in left:
                await producer.cancel(job)
            has_cancelled, since = True, time.monotonic()
        elif time.monotonic() > since + PATIENCE_S:
            break
        await asyncio.sleep(1)
    return await producer.states(sorted(jobs - service.rows().keys()))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ops/fuzz jobs", description=__doc__)
    parser.add_argument("--count", type=int, default=2_000, help="jobs (default: 2000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--rate", type=float, default=60.0, help="jobs per second, at most")
    parser.add_argument("--probe-seconds", type=float, default=20.0, help="0: without the probe")
    parser.add_argument("--model", default="", help="default: a drawn Llama on bytes")
    parser.add_argument("--log", type=Path, help="keep the worker's log in this file")
    options = parser.parse_args(arguments)
    numbers = range(options.first, options.first + options.count)
    cases = [Case.draw(options.seed, number) for number in numbers]
    with tempfile.TemporaryDirectory(prefix="tokenmill-fuzz-") as folder:
        outcome = asyncio.run(
            fuzz(
                cases,
                rate=options.rate,
                probe_s=options.probe_seconds,
                model=options.model,
                folder=Path(folder),
            )
        )
    if options.log is not None:
        options.log.write_text(outcome.log)
    problems = list(outcome.problems())
    for problem in problems[:MOST_SHOWN]:
        print(f"- {problem}")
    if len(problems) > MOST_SHOWN:
        print(f"- and {len(problems) - MOST_SHOWN} more")
    print(f"seed {options.seed}, jobs {options.first:,} to {numbers.stop - 1:,}")
    print(outcome.summary())
    print(f"findings: {len(problems)}")
    return 1 if problems else 0
