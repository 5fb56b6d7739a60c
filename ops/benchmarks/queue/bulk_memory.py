"""`ops/bench bulk --memory LINES`: memory use on a large file, from its validation to its export.

Memory must stay constant as the file grows. Three passes run, each in a process of its own whose
resident memory is sampled: the file alone (survey, and a job built of each line); the file through
a model-free worker (`tokenmill bulk run`; the worker and Valkey are sampled too); and the export of
a batch that is complete in SQL. Memory is reported at every tenth of the way, to show growth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import redis
import sqlalchemy

from ops.demonstration.stack import DemoStack
from tokenmill import Client
from tokenmill.bulk import Batch, BatchState, Paths, export_batch, new_batch, open_store
from tokenmill.bulk.formats.input_file import BatchDefaults, read, summarise, to_request
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.openai import COMPLETIONS_URL
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus, Usage
from tokenmill_schemas.tables import jobs
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record.rows import JobRecord

_STEP_S = 0.2
_TOLD_EVERY_S = 60.0
_PAGE = 2_000


class Meter:
    """Samples the resident MiB of a process until `stop`.

    `at` returns the progress of the pass, 0 to 1.
    """

    def __init__(self, pid: int, at: Callable[[], float]) -> None:
        self.mib: dict[int, float] = {}  # last sample by tenth of the pass
        self.peak = self.last = 0.0
        self._pid, self._at = pid, at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, object]:
        self._over.set()
        self._thread.join()
        told = [f"{10 * tenth} %: {mib:.1f}" for tenth, mib in sorted(self.mib.items())]
        return {"peak MiB": round(self.peak, 1), "MiB on the way": ", ".join(told)}

    def _run(self) -> None:
        while not self._over.wait(_STEP_S):
            mib = self.last = resident_mib(self._pid) or self.last
            self.peak = max(self.peak, mib)
            self.mib[min(10, int(10 * self._at()))] = mib


class Counter:
    """Counts the lines of a growing file; reads only what was appended since the last count."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._lines = path, 0, 0

    def count(self) -> int:
        with self._path.open("rb") as file:
            file.seek(self._place)
            while block := file.read(1 << 20):
                self._lines += block.count(b"\n")
                self._place += len(block)
        return self._lines


def resident_mib(pid: int) -> float:
    """Return the resident memory in MiB, or 0 if the process is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(arguments: argparse.Namespace) -> dict[str, object]:
    report: dict[str, object] = {}
    with DemoStack("synthetic", "bench") as stack:
        stack.start(lambda _: None)
        source = stack.directory / "in.jsonl"
        write_lines(source, arguments.memory, arguments.bulk_tokens)
        report["lines"] = arguments.memory
        report["file MiB"] = round(source.stat().st_size / 2**20, 1)
        for name in () if arguments.only_way else ("survey", "jobs"):
            report[name] = _apart(name, source, arguments.memory)
        if not arguments.only_file:
            print(json.dumps(report, indent=2), file=sys.stderr)
            report["whole way"] = _whole_way(stack, source, arguments.memory, arguments.limit)
        if not arguments.only_way:
            report["export"] = _apart(
                "export", source, arguments.memory, stack.redis_url, stack.database_url
            )
    print(json.dumps(report, indent=2))
    return report


def write_lines(path: Path, count: int, tokens: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            body = {
                "model": "synthetic",
                "prompt": f"Number {number} is",
                "max_tokens": tokens,
                "ignore_eos": True,
            }
            line = {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": COMPLETIONS_URL,
                "body": body,
            }
            file.write(json.dumps(line) + "\n")


# ── each part in a process of its own ──


def _apart(*words: object) -> dict[str, object]:
    command = [sys.executable, "-m", "ops.benchmarks.queue.bulk_memory", *map(str, words)]
    reply = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    told: dict[str, object] = json.loads(reply.stdout)
    return told


@contextmanager
def _metered(told: dict[str, object], at: Callable[[], float]) -> Iterator[None]:
    told["MiB before"] = round(resident_mib(os.getpid()), 1)
    meter, began = Meter(os.getpid(), at), time.monotonic()
    yield
    told["seconds"] = round(time.monotonic() - began, 1)
    told |= meter.stop()


def _survey(source: Path, count: int) -> dict[str, object]:
    told: dict[str, object] = {}
    seen = [0]
    with _metered(told, lambda: seen[0] / count):
        summarise(source, lambda lines: seen.__setitem__(0, lines))
    return told


def _jobs(source: Path, count: int) -> dict[str, object]:
    told: dict[str, object] = {}
    order, done = BatchDefaults("batch_x"), 0
    with _metered(told, lambda: done / count):
        for line in read(source):
            encode(to_request(line, order))  # type: ignore[arg-type]
            done += 1
    return told


def _export(source: Path, count: int, redis_url: str, database: str) -> dict[str, object]:
    """Export a batch whose jobs have all ended; its rows are written here in the worker's place."""
    told: dict[str, object] = {}
    paths = Paths.of(source.with_name("exported.jsonl"))
    with Client(redis_url, queue="bench", database=database) as client:
        store = open_store(client)
        batch = _ended_batch(client, source, count)
        store.create(batch)
        store.describe(batch)
        _write_rows(database, batch, count)
        store.move(batch.id, BatchState.COMPLETED, [BatchState.VALIDATING])
        with _metered(told, lambda: _num_bytes(paths.output) / (count * 420)):
            _, missing = export_batch(client, store, batch.id, paths)
        told["lines without an answer"] = missing
        store.close()
    return told


def _ended_batch(client: Client, source: Path, count: int) -> Batch:
    return msgspec.structs.replace(
        new_batch(client, source), total=count, last_line=count, submitted=count, over_line=count
    )


def _write_rows(database: str, batch: Batch, count: int) -> None:
    engine = sqlalchemy.create_engine(database)
    with engine.begin() as connection:
        for start in range(1, count + 1, _PAGE):
            rows = [_row(batch, line) for line in range(start, min(start + _PAGE, count + 1))]
            connection.execute(jobs.insert(), [row.job for row in rows])
    engine.dispose()


def _row(batch: Batch, line: int) -> JobRecord:
    name, now = f"{batch.id}-{line}", 1_700_000_000_000
    ids = tuple(range(8))
    choice = ChoiceResult(
        text="abcdefgh",
        token_ids=ids,
        text_ends=tuple(range(1, 9)),
        finish_reason=FinishReason.LENGTH,
    )
    used, metadata = (
        Usage(prompt_tokens=12, completion_tokens=8),
        {"custom_id": name, "endpoint": COMPLETIONS_URL},
    )
    result = JobResult(
        job_id=name, status=JobStatus.SUCCEEDED, model="synthetic", choices=(choice,),
        created_ms=now,
        finished_ms=now + line, usage=used, metadata=metadata,
    )  # fmt: skip
    request = JobRequest(job_id=name, batch_id=batch.id, prompt="x", metadata=metadata)
    chunk = Chunk(
        job_id=name,
        index=8,
        finish_reason=FinishReason.LENGTH,
        status=JobStatus.SUCCEEDED,
        usage=used,
    )
    return JobRecord.of(FinishedJob(1, result, chunk, request=request), queue="bench")


def _num_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# ── the whole service ──


def _whole_way(stack: DemoStack, source: Path, count: int, limit_s: float) -> dict[str, object]:
    output = source.with_name("out.jsonl")
    where = [
        "--redis-url",
        stack.redis_url,
        "--queue",
        stack.queue,
        "--database-url",
        stack.database_url,
    ]
    command = [
        sys.executable,
        "-m",
        "tokenmill.cli",
        "bulk",
        "run",
        str(source),
        "-o",
        str(output),
        *where,
    ]
    size = [1.0]

    def at() -> float:
        return min(1.0, _num_bytes(output) / (count * size[0]))

    began = time.monotonic()
    with (
        redis.Redis.from_url(stack.redis_url) as server,
        subprocess.Popen(command, stderr=subprocess.DEVNULL) as child,
    ):
        while not _num_bytes(output) and child.poll() is None:
            time.sleep(_STEP_S)
        with output.open("rb") as file:
            size[0] = float(len(file.readline()))
        meters = {"tokenmill bulk run": Meter(child.pid, at)}
        info = server.info("server")
        meters |= {"Valkey": Meter(int(info["process_id"]), at)}
        meters |= {name: Meter(pid, at) for name, pid in worker_pids(stack).items()}
        counter, by_time = Counter(output), []
        while child.poll() is None and time.monotonic() - began < limit_s:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, min(_TOLD_EVERY_S, began + limit_s - time.monotonic())))
            mib = {name: round(meter.last, 1) for name, meter in meters.items()}
            by_time.append(
                {"seconds": round(time.monotonic() - began), "lines": counter.count(), **mib}
            )
            print(json.dumps(by_time[-1]), file=sys.stderr, flush=True)
        is_whole = child.poll() is not None
        child.kill()
        seconds = time.monotonic() - began
    answered = counter.count()
    told: dict[str, object] = {"came to its end": is_whole, "lines answered": answered}
    told |= {
        "seconds": round(seconds, 1),
        "lines/s": round(answered / seconds, 1),
        "over time": by_time,
    }
    return told | {name: meter.stop() for name, meter in meters.items()}


def worker_pids(stack: DemoStack) -> dict[str, int]:
    """Return the process ids of the worker and of its engine."""
    found: dict[str, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            place = (entry / "cwd").resolve()
        except OSError:
            continue
        if place == stack.directory.resolve() and b"worker" in words:
            found["worker"] = int(entry.name)
        elif (
            place == stack.directory.resolve() and b"tokenmill_worker.engine.process.child" in words
        ):
            found["engine"] = int(entry.name)
    return found


def main(words: list[str]) -> None:
    """Run one part and print its result as JSON."""
    part, source, count = words[0], Path(words[1]), int(words[2])
    if part == "export":
        told = _export(source, count, words[3], words[4])
    else:
        told = {"survey": _survey, "jobs": _jobs}[part](source, count)
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
