"""Runs stages one after the other: processes with a time limit and a log file each.

A stage that fails, hangs or is silent does not stop the next. Lines of its log that begin with
`| ` go to the table at the end.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "| "
MOST_LINES = 40  # of the table
WIDTH = 150
MOST_BYTES = 15 << 20  # of a file that comes back
LEAST_S = 5.0  # a stage with less time is not started


@dataclass(frozen=True, slots=True)
class CheckStage:
    """A command, and the seconds after which its process group is killed."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True, slots=True)
class StageResult:
    """The end of a stage, its seconds, and the lines that it wrote for the table."""

    name: str
    said: str
    wall_s: float
    lines: Sequence[str]


def run_stages(
    stages: Sequence[CheckStage], out: Path, environment: Mapping[str, str], limit_s: float
) -> list[StageResult]:
    """Run every stage; all of them together end within `limit_s` seconds."""
    until, results = time.monotonic() + limit_s, []
    for stage in stages:
        left = until - time.monotonic()
        if left < LEAST_S:
            results.append(StageResult(stage.name, "no time was left", 0.0, ()))
            continue
        print(f"[gpu-check] {stage.name}: at most {min(stage.limit_s, left):.0f} s", flush=True)
        results.append(run_stage(stage, out, environment, min(stage.limit_s, left)))
        print(f"[gpu-check] {stage.name}: {results[-1].said}", flush=True)
    return results


def run_stage(
    stage: CheckStage, out: Path, environment: Mapping[str, str], limit_s: float
) -> StageResult:
    log, started = out / f"{stage.name}.log", time.monotonic()
    with log.open("wb") as file:
        try:
            child = subprocess.Popen(
                stage.command,
                cwd=ROOT,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return StageResult(stage.name, f"not started: {error}", 0.0, ())
        try:
            status = child.wait(limit_s)
            said = "ok" if status == 0 else f"failed ({status})"
        except subprocess.TimeoutExpired:
            said = f"killed after {limit_s:.0f} s"
        finally:  # its workers too, also where the stage itself has ended
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return StageResult(stage.name, said, time.monotonic() - started, _shorten(log))


def _shorten(log: Path) -> list[str]:
    """Return the log's lines for the table; cut the middle out of a log too large to come back."""
    content = log.read_bytes()
    if len(content) > MOST_BYTES:
        half = MOST_BYTES // 2
        log.write_bytes(content[:half] + b"\n... cut ...\n" + content[-half:])
    lines = content.decode(errors="replace").splitlines()
    return [line.removeprefix(MARK)[:WIDTH] for line in lines if line.startswith(MARK)]


def table(results: Sequence[StageResult], others: Sequence[str] = ()) -> list[str]:
    """Return at most `MOST_LINES` lines: the others, then each stage and what it found.

    Where there are too many, the stages with the most lines lose their last ones.
    """
    shown = [len(result.lines) for result in results]
    while len(others) + len(results) + sum(shown) > MOST_LINES and any(shown):
        shown[shown.index(max(shown))] -= 1
    lines = list(others)
    for result, count in zip(results, shown, strict=True):
        hidden = len(result.lines) - count
        more = f", {hidden} more lines in its log" if hidden else ""
        lines.append(f"{result.name}: {result.said} ({result.wall_s:.1f} s{more})")
        lines += [f"  {line}" for line in result.lines[:count]]
    return lines
