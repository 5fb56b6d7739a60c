"""ops/compose-check without Docker: its lines, exit status, copy of the checkout and blocks.

The checks themselves run with Docker only, by hand.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.compose_check import __main__ as command
from ops.compose_check import checks, stand_ins
from ops.compose_check.project import CheckFailed, ComposeProject
from tokenmill_schemas.job import SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ComposeProject:
    """A project whose `docker` prints what the file `docker.out` beside it has."""
    program = tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncat {tmp_path}/docker.out\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("TOKENMILL_MODEL", "another")
    (tmp_path / "docker.out").write_text("")
    return ComposeProject(tmp_path / "copy", tmp_path / "log")


def fails(_project: ComposeProject) -> str:
    raise CheckFailed("the reason")


def passes(_project: ComposeProject) -> str:
    return "what it saw"


def test_a_failed_check_is_named_and_counted(
    project: ComposeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = {"first": passes, "second": passes, "third": fails, "fourth": passes}
    assert command.failed(project, checked)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[compose-check] first: ok (0 s): what it saw"
    assert lines[2] == "[compose-check] third: FAILED (0 s): the reason"
    assert lines[4].startswith("[compose-check] 3 of 4 checks passed in ")
    assert not command.failed(project, {"first": passes})


def test_a_failed_build_skips_the_other_checks(
    project: ComposeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.failed(project, {"build": fails, "start": passes})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_project_is_a_copy_with_its_own_passwords(project: ComposeProject) -> None:
    assert (project.folder / "docker-compose.yml").read_bytes() == (
        ROOT / "docker-compose.yml"
    ).read_bytes()
    before = project.variables
    assert len(before["REDIS_WORKER_PASSWORD"]) == 48
    project.change(REDIS_PORT="7001", POSTGRES_PASSWORD=None)
    left = {name: value for name, value in before.items() if name != "POSTGRES_PASSWORD"}
    assert project.variables == left | {"REDIS_PORT": "7001"}


def test_shell_variables_do_not_override_the_project_s(
    project: ComposeProject,
) -> None:
    assert "another" not in project.run(["env"])


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"Status": "running", "Health": {"Status": "unhealthy"}}, "check-worker-1 is unhealthy"),
        ({"Status": "exited", "ExitCode": 1}, "check-worker-1 ended with 1"),
        ({"Status": "restarting", "ExitCode": 3}, "check-worker-1 ended with 3"),
    ],
)
def test_an_unhealthy_or_ended_container_ends_the_wait(
    project: ComposeProject, tmp_path: Path, state: dict[str, Any], named: str
) -> None:
    told = [{"Name": "/check-worker-1", "State": state}]
    (tmp_path / "docker.out").write_text(json.dumps(told, separators=(",", ":")))
    with pytest.raises(CheckFailed, match=named):
        project.wait_healthy(limit_s=0)


def test_a_starting_container_is_waited_for_until_the_limit(
    project: ComposeProject, tmp_path: Path
) -> None:
    told = [{"Name": "/a", "State": {"Status": "running", "Health": {"Status": "starting"}}}]
    (tmp_path / "docker.out").write_text(json.dumps(told, separators=(",", ":")))
    with pytest.raises(CheckFailed, match="it is not so that every container is healthy"):
        project.wait_healthy(limit_s=0)


def test_the_guide_s_commands_are_found_and_parse_as_shell() -> None:
    for first in ("# back up", "# restore", "# change a password"):
        block = checks.guide_block(first)
        assert "docker compose" in block
        subprocess.run(["bash", "-n", "-c", block], check=True)


def test_checked_names_are_services_and_each_has_a_stand_in_image() -> None:
    services = COMPOSE["services"]
    assert {*checks.SERVERS, *checks.ROLES} <= set(services)
    ours = json.loads(stand_ins.override())["services"]
    built = {name for name, service in services.items() if "build" in service}
    assert set(ours) == {*built - {"worker-gpu"}, *checks.SERVERS, "rights"}
    assert all("image" in each or "PYTHON_IMAGE" in each["build"]["args"] for each in ours.values())
    assert all(name.startswith("tokenmill-check/") for name in stand_ins.NAMES.values())


def test_the_version_to_upgrade_from_has_today_s_wire_and_a_schema() -> None:
    older, wire = checks.older_commit(), "schemas/tokenmill_schemas/job.py"
    assert f"SCHEMA_VERSION: Final = {SCHEMA_VERSION}  #" in _git("show", f"{older}:{wire}")
    folder = "migrations/tokenmill_migrations/versions"
    assert f"{folder}/0" in _git("ls-tree", "--name-only", older, f"{folder}/")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
