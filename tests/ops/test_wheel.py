"""The two wheels hold what they need, and their import names leave an application's own alone."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tokenmill_schemas.release import BASE, with_revision

ROOT = Path(__file__).parents[2]
SOURCES = ("api_client", "schemas", "worker", "migrations")
CLIENT_PACKAGES = ("api_client/tokenmill", "schemas/tokenmill_schemas")
PACKAGES = (
    *CLIENT_PACKAGES,
    "api_client/tokenmill_gateway",
    "worker/tokenmill_worker",
    "migrations/tokenmill_migrations",
)
REVISION = "9fc2b2b7"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, because a build writes into its tree."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for root in SOURCES:
        shutil.copytree(ROOT / root, copy / root, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build(tree, tree)


@pytest.fixture(scope="module")
def client_wheel(tree: Path) -> Path:
    return build(tree / "api_client", tree)


def build(project: Path, tree: Path) -> Path:
    """Return the wheel of `project`. Nothing is downloaded."""
    target = tree / f"wheel-of-{project.name}"
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(project))
    (built,) = target.glob("*.whl")
    return built


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--no-index"]
    environment = {**os.environ, "TOKENMILL_REVISION": REVISION}  # noqa: TID251 - for a child
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def files_of(tree: Path, *packages: str) -> set[str]:
    """Return the packages' files, each `ROOT/PACKAGE`, as a wheel names them."""
    return {
        str(file.relative_to((tree / package).parent))
        for package in packages
        for file in (tree / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts  # a build imports the version
    }


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """An application whose own modules have the names of this repository's folders."""
    folder = tmp_path / "application"
    (folder / "migrations").mkdir(parents=True)
    for name in ("schemas.py", "worker.py", "api_client.py", "migrations/__init__.py"):
        (folder / name).write_text("OWNER = 'application'\n", encoding="utf-8")
    return folder


def run(application: Path, site: Path, *arguments: str) -> str:
    """Run Python in the application's folder, beside what is installed in `site`."""
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(application)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=application,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


OWN_MODULES = """
import api_client, migrations, schemas, worker
assert {module.OWNER for module in (api_client, migrations, schemas, worker)} == {"application"}
"""


def test_the_wheel_holds_every_file_of_the_packages(tree: Path, wheel: Path) -> None:
    """Also Lua scripts, C++ kernels, a tokenizer, the console and Alembic's files."""
    files = files_in(wheel)
    assert files == files_of(tree, *PACKAGES)
    for kind in (
        ".lua",
        ".cpp",
        ".h",
        ".ini",
        ".mako",
        ".json",
        ".html",
        ".css",
        ".js",
        "py.typed",
    ):
        assert any(name.endswith(kind) for name in files), f"no {kind} file"


def test_the_client_s_wheel_holds_neither_worker_nor_migrations(
    tree: Path, client_wheel: Path
) -> None:
    files = files_in(client_wheel)
    assert files == files_of(tree, *CLIENT_PACKAGES)
    assert {name.partition("/")[0] for name in files} == {"tokenmill", "tokenmill_schemas"}


def test_both_wheels_carry_the_revision_that_they_were_built_from(
    wheel: Path, client_wheel: Path
) -> None:
    versions = [built.name.split("-")[1] for built in (wheel, client_wheel)]
    assert versions == [f"{BASE}+g{REVISION}"] * 2


@pytest.mark.slow
def test_an_application_with_equally_named_modules_can_use_client_and_worker(
    wheel: Path, application: Path, tmp_path: Path
) -> None:
    for requirement in ("torch", "alembic", "celery"):
        pytest.importorskip(requirement)
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", str(site), str(wheel))
    code = """
from tokenmill import Client
from tokenmill_worker.engines.own import Engine
import tokenmill_migrations, tokenmill_worker.tasks
print(tokenmill_worker.__file__, tokenmill_migrations.__file__)
"""
    places = run(application, site, "-c", code + OWN_MODULES).split()
    assert all(place.startswith(str(site)) for place in places)
    run(
        application,
        site,
        "-m",
        "tokenmill.cli",
        "db",
        "upgrade",
        "--database-url",
        "sqlite:///a.db",
    )
    assert (application / "a.db").exists()


@pytest.mark.slow
def test_an_application_can_use_the_client_s_wheel_alone(
    client_wheel: Path, application: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", str(site), str(client_wheel))
    code = """
import sys
from tokenmill import Client
from tokenmill.testing import InMemoryQueue
with InMemoryQueue(default="Yes.") as queue:
    client = queue.client()
    assert client.result(client.submit(prompt="Well?"), timeout=20).text == "Yes."
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"tokenmill_worker", "tokenmill_migrations", "torch", "sqlalchemy"}, loaded
print(Client.__module__, sys.modules["tokenmill"].__file__)
"""
    _, place = run(application, site, "-c", code + OWN_MODULES).split()
    assert place.startswith(str(site))
    printed = run(application, site, "-m", "tokenmill.cli", "--version")
    assert printed.split() == ["tokenmill", with_revision(REVISION)]


def projects() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables [project] of both distributions: the whole one and the client's."""
    whole, client = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (".", "api_client")
    )
    return whole, client


def test_both_distributions_have_the_same_requirements() -> None:
    whole, client = projects()
    for key in ("dynamic", "requires-python", "dependencies", "scripts"):
        assert client[key] == whole[key], key
    extras = whole["optional-dependencies"]
    assert client["optional-dependencies"].items() <= extras.items()


def test_each_extra_that_pages_and_sources_name_exists() -> None:
    whole, client = (set(project["optional-dependencies"]) for project in projects())
    pages = [ROOT / "README.md", *(ROOT / "ops").glob("*.md"), *(ROOT / "ops/guides").glob("*.md")]
    sources = [path for root in SOURCES for path in (ROOT / root).rglob("*.py")]
    text = "\n".join(path.read_text("utf-8") for path in [*pages, *sources])
    named = re.findall(r"(api_client|'\.|vllm)\[([\w,]+)\]", text)
    assert len(named) > 10
    for where, extras in named:
        assert set(extras.split(",")) <= (client if where == "api_client" else whole), extras


def test_the_service_s_extra_names_no_package_that_computes() -> None:
    extras = projects()[0]["optional-dependencies"]
    service, engine = (
        {re.split("[<>=;]", line)[0] for line in extras[name]} for name in ("worker", "engine")
    )
    assert not service & {"torch", "xgrammar", "llguidance", "safetensors"}
    assert {"torch", "xgrammar", "llguidance"} <= engine
