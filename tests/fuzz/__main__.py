"""`ops/fuzz [--inputs N] [--target NAME] [--seed S]`: every decoder and the worker's intake, under
bytes that nobody meant. Each target runs in a process of its own. The exit status is 1 when
anything undocumented came out. `ops/fuzz jobs` fuzzes whole jobs against a real worker.
"""

# ruff: noqa: T201, TID251 - a command: it prints, and hands its environment on
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

import msgspec

from tests.fuzz.driver import Finding, Report, limit_memory, run_guided, run_seeded

INSTRUMENTED = [
    "tokenmill_schemas",
    "tokenmill",
    "tokenmill_worker.input",
    "tokenmill_worker.text",
    "tokenmill_worker.engines.own",
]


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["jobs"]:
        from tests.fuzz.jobs.run import main as fuzz_jobs

        return fuzz_jobs(given[1:])
    parser = argparse.ArgumentParser(
        prog="ops/fuzz", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="of all targets together (default: 100000)"
    )
    parser.add_argument("--target", help="only this one; all inputs go to it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--plain", action="store_true", help="without atheris, also where it is installed"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.child is not None:
        return _child(options)
    return _parent(options)


def _child(options: argparse.Namespace) -> int:
    """Fuzz one target and write its report to the file."""
    guided = not options.plain and find_spec("atheris") is not None
    if guided:
        import atheris

        with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
            from tests.fuzz.targets import targets
    else:
        from tests.fuzz.targets import targets
    limit_memory()
    target = targets()[options.target]

    def write(report: Report) -> None:
        options.child.write_bytes(msgspec.json.encode(report))

    if guided:
        run_guided(target, options.inputs, options.seed, write)
    try:
        write(run_seeded(target, options.inputs, options.seed))
    except Finding as finding:
        traceback.print_exception(finding)
        return 1
    return 0


def _parent(options: argparse.Namespace) -> int:
    from tests.fuzz.targets import targets

    known = targets()
    if options.target is not None and options.target not in known:
        print(
            f"ops/fuzz: no target {options.target}; there are {', '.join(known)}", file=sys.stderr
        )
        return 2
    chosen = [known[options.target]] if options.target else list(known.values())
    shares = sum(target.share for target in chosen)
    print(
        f"{'target':<16}{'inputs':>10}{'read':>10}{'refused':>10}{'slowest':>12}{'time':>10}",
        flush=True,
    )
    total, findings, started = 0, 0, time.monotonic()
    for place, target in enumerate(chosen):
        before = sum(other.share for other in chosen[:place])
        inputs = (
            options.inputs * (before + target.share) // shares - options.inputs * before // shares
        )
        report, said = _run_child(target.name, inputs, options)
        if report is None:
            findings += 1
            print(f"{target.name:<16} FOUND something undocumented:\n{said}", flush=True)
            continue
        total += report.inputs
        how = "" if report.guided else "  (not guided)"
        print(
            f"{target.name:<16}{report.inputs:>10,}{report.read:>10,}{report.refused:>10,}"
            f"{report.slowest_ms:>9.1f} ms"
            f"{report.seconds:>8.0f} s{how}",
            flush=True,
        )
    print(
        f"{total:,} inputs in {time.monotonic() - started:.0f} s, seed {options.seed}, "
        f"findings: {findings}"
    )
    return 1 if findings else 0


def _run_child(name: str, inputs: int, options: argparse.Namespace) -> tuple[Report | None, str]:
    with tempfile.TemporaryDirectory(prefix="tokenmill-fuzz-") as folder:
        path = Path(folder, "report.json")
        command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--inputs", str(inputs)]
        command += [
            "--seed",
            str(options.seed),
            "--child",
            str(path),
            *(["--plain"] if options.plain else []),
        ]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=environment | _path()
        )
        report = msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else None
        if done.returncode or report is None:
            return None, (done.stdout + done.stderr)[-6_000:]
        return report, ""


def _path() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


if __name__ == "__main__":
    sys.exit(main())
