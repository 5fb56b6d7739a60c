"""`ops/compose-check`: builds and starts docker-compose.yml, and goes through what it promises."""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ops.compose_check import checks, gateway
from ops.compose_check.project import ROOT, CheckFailed, ComposeProject
from ops.compose_check.stand_ins import build_stand_ins, override

NEEDED = ("base images", "build", "older version")
Check = Callable[[ComposeProject], str]
VARIABLES = {
    "COMPOSE_PROJECT_NAME": "tokenmill-check",
    "COMPOSE_PROFILES": "cpu",
    "TOKENMILL_VERSION": checks.IMAGE,
    "TOKENMILL_LOG_FORMAT": "json",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ops/compose-check", description=__doc__)
    parser.add_argument("--stand-ins", action="store_true", help="base images of Debian's packages")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that the stand-ins offer pip")
    parser.add_argument(
        "--older",
        help="commit to upgrade from (default: before the last migration, or the wire's first)",
    )
    options = parser.parse_args(arguments)
    older = options.older or checks.older_commit()
    promised = _checks(older)
    if options.stand_ins:
        promised = {
            "base images": lambda project: build_stand_ins(project.run, options.wheels),
            **promised,
        }
    with tempfile.TemporaryDirectory(prefix="tokenmill-check-") as scratch:
        project = ComposeProject(Path(scratch) / "tokenmill", ROOT / ".cache/compose-check.log")
        ports = ("REDIS_PORT", "POSTGRES_PORT", "GATEWAY_PORT")
        project.change(**VARIABLES, **{name: _free_port() for name in ports})
        if options.stand_ins:
            (project.folder / "stand-ins.json").write_text(override())
            project.change(COMPOSE_FILE="docker-compose.yml:stand-ins.json")
        try:
            project.remove()  # what an earlier call left
            return int(failed(project, promised))
        finally:
            project.remove()


def _checks(older: str) -> Mapping[str, Check]:
    return {
        "build": checks.builds,
        "older version": lambda project: checks.starts_older(project, older),
        "upgrade in mid-answer": checks.upgrades,
        "back to the older version": checks.goes_back,
        "rights": checks.has_few_rights,
        "settings of every role": checks.settings_reach_roles,
        "a backend on the host": checks.answers_a_backend,
        "OpenAI's client": gateway.answers_openai,
        "waiting jobs over a restart": checks.keeps_waiting_jobs,
        **{
            f"restart of {service} in mid-answer": checks.survives_restart_of(service)
            for service in (*checks.SERVERS, *checks.ROLES)
        },
        "drain": checks.drains,
        "two workers": checks.scales,
        "a new password in mid-answer": checks.changes_passwords,
        "an own model": checks.serves_own_model,
        "backup and restore": checks.is_restored,
        "stop": checks.stops,
    }


def failed(project: ComposeProject, promised: Mapping[str, Check]) -> bool:
    """Run each check and print its line; without an image nothing else can run."""
    started, passed = time.monotonic(), 0
    for name, check in promised.items():
        begun = time.monotonic()
        try:
            told, word = check(project), "ok"
            passed += 1
        except (CheckFailed, OSError, ValueError, subprocess.SubprocessError) as error:
            told, word = str(error), "FAILED"
        seconds = time.monotonic() - begun
        print(f"[compose-check] {name}: {word} ({seconds:.0f} s): {told}", flush=True)
        if word == "FAILED" and name in NEEDED:
            break
    minutes = (time.monotonic() - started) / 60
    print(f"[compose-check] {passed} of {len(promised)} checks passed in {minutes:.0f} minutes")
    return passed < len(promised)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
