"""The version tells two deployments apart: it names the revision that the code comes from."""

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from tokenmill.cli import app
from tokenmill_schemas import release
from tokenmill_schemas.release import BASE, with_revision
from tokenmill_worker.telemetry.worker_status import package_version


@pytest.mark.parametrize(
    ("revision", "local"),
    [
        ("9fc2b2b7", "g9fc2b2b7"),
        ("9fc2b2b7-dirty\n", "g9fc2b2b7.dirty"),
        ("9fc2b2b7d1f5c0de9fc2b2b7d1f5c0de9fc2b2b7", "g9fc2b2b7d1f5c0de9fc2b2b7d1f5c0de9fc2b2b7"),
        (f"v{BASE}-5-g9fc2b2b7", "5.g9fc2b2b7"),
        ("v0.0.9-5-g9fc2b2b7-dirty", "v0.0.9.5.g9fc2b2b7.dirty"),
        (f"v{BASE}", None),
        ("", None),
    ],
)
def test_a_revision_becomes_the_local_part_of_a_version(revision: str, local: str | None) -> None:
    found = Version(with_revision(revision))
    assert (found.base_version, found.local) == (BASE, local)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository whose only file is this module."""
    place = tmp_path / "schemas" / "tokenmill_schemas" / "release.py"
    place.parent.mkdir(parents=True)
    shutil.copy(release.__file__, place)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    person = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(
        ["git", *person, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def version_of(checkout: Path) -> str:
    names: dict[str, Any] = runpy.run_path(str(checkout / "schemas/tokenmill_schemas/release.py"))
    return str(names["version"]())


def test_a_checkout_names_its_commit_its_tag_and_its_changes(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENMILL_REVISION", raising=False)
    first = git(checkout, "rev-parse", "--short=8", "HEAD")
    assert version_of(checkout) == f"{BASE}+g{first}"
    git(checkout, "tag", f"v{BASE}")
    assert version_of(checkout) == BASE
    git(checkout, "commit", "--quiet", "--allow-empty", "-m", "two")
    second = git(checkout, "rev-parse", "--short=8", "HEAD")
    with (checkout / "schemas/tokenmill_schemas/release.py").open("a") as file:
        file.write("# changed\n")
    assert version_of(checkout) == f"{BASE}+1.g{second}.dirty"


def test_without_a_repository_the_variable_names_the_revision(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build of an image has no repository."""
    shutil.rmtree(checkout / ".git")
    names = runpy.run_path(str(checkout / "schemas/tokenmill_schemas/release.py"))
    monkeypatch.delenv("TOKENMILL_REVISION", raising=False)
    assert names["described"]() == BASE
    monkeypatch.setenv("TOKENMILL_REVISION", "9fc2b2b7")
    assert names["described"]() == f"{BASE}+g9fc2b2b7"


def test_the_command_and_the_worker_report_the_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    found = release.version()
    assert found.startswith(BASE)
    assert (done.exit_code, done.stdout) == (0, f"tokenmill {found}\n")
    package_version.cache_clear()
    assert package_version() == found
