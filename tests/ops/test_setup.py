"""ops/setup: instant when nothing changed, clear when it cannot work. (That it builds an
environment is shown by everything else running in one.)
"""

import fcntl
import os
import pty
import subprocess
import sys
import termios
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

from ops.tools.provision import Progress, Provisioner, SetupError, notes

ROOT = Path(__file__).parents[2]


def test_a_line_of_progress_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal wraps a longer line, and the next one is written below it instead of over it."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    with os.fdopen(end, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        Progress().show("installing " + "x" * 200)
        written = os.read(terminal, 4096).decode()
    os.close(terminal)
    assert len(written.removeprefix("\r\033[K")) == 79


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that ops/setup reads, elsewhere, with an environment that claims to be finished."""
    for folder in ("examples", "tools"):
        (tmp_path / "ops" / folder).mkdir(parents=True)
    files = (
        "setup",
        "tools/provision.py",
        "constraints.txt",
        "constraints-cpu.txt",
        "examples/package-lock.json",
    )
    for name in ("pyproject.toml", *(f"ops/{file}" for file in files)):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "ops" / "setup").chmod(0o755)
    return tmp_path


def run_setup(
    checkout: Path, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    command = [str(checkout / "ops" / "setup"), *arguments]
    return subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )


def test_the_celery_extras_require_the_redis_transport() -> None:
    """`celery` alone lacks what kombu's transport imports: it is in the requirements of
    `celery[redis]`.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    asked = [line for lines in extras.values() for line in lines if line.startswith("celery")]
    assert len(asked) == 2
    assert all(line.startswith("celery[redis]") for line in asked)
    transport = [line for line in requires("kombu") or [] if 'extra == "redis"' in line]
    assert any(line.startswith("packaging") for line in transport)


def test_an_unknown_level_is_refused(checkout: Path) -> None:
    done = run_setup(checkout, "everything")
    assert done.returncode == 2
    assert "usage: ops/setup" in done.stderr


def test_an_old_python_is_refused_by_version(checkout: Path, tmp_path: Path) -> None:
    old = tmp_path / "bin"
    old.mkdir()
    for name in ("bash", "dirname", "readlink", "cat", "cksum"):
        (old / name).symlink_to(Path("/bin" if Path("/bin", name).exists() else "/usr/bin", name))
    (old / "python3").write_text("#!/bin/bash\nexit 1\n")
    (old / "python3").chmod(0o755)
    done = run_setup(checkout, PATH=str(old))
    assert done.returncode == 1
    assert "needs Python 3.11" in done.stderr


def test_a_finished_environment_is_not_built_again(checkout: Path) -> None:
    # A python that records its arguments tells us what the stamp should hold.
    recorder = checkout / "recorder"
    recorder.write_text(f'#!/bin/sh\n[ "$1" = -c ] || printf "%s" "$4" > {checkout}/wanted\n')
    recorder.chmod(0o755)
    assert run_setup(checkout, "demo", PYTHON=str(recorder)).returncode == 0
    binaries = checkout / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    (checkout / ".venv" / ".tokenmill-demo").write_text((checkout / "wanted").read_text())
    (checkout / "wanted").unlink()
    assert run_setup(checkout, "demo", PYTHON=str(recorder)).returncode == 0
    assert not (checkout / "wanted").exists(), "it must not have been called again"
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert run_setup(checkout, "demo", PYTHON=str(recorder)).returncode == 0
    assert (checkout / "wanted").exists(), "a change must be noticed"


def test_the_download_size_and_missing_tools_are_printed_first(tmp_path: Path) -> None:
    def printed(has_torch: bool = False, **environment: str) -> str:
        return "\n".join(notes({"PATH": str(tmp_path), **environment}, has_torch=has_torch))

    assert "about 3 GB" in printed()
    assert "no GPU here: TORCH_WHEEL=" in printed()
    assert "no g++ here" in printed()
    assert "GB" not in printed(TORCH_WHEEL="/wheels/torch.whl")
    assert "GB" not in printed(has_torch=True)
    for name in ("g++", "nvidia-smi"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert (
        printed()
        == "downloads about 3 GB: pip's torch for Linux comes with CUDA, and .venv takes 5 GB"
    )


def test_a_failed_pip_is_an_error_of_one_sentence(checkout: Path) -> None:
    provisioner = Provisioner(checkout, "demo", Progress())
    provisioner.log.parent.mkdir()
    provisioner.log.touch()
    command = [
        "/bin/sh",
        "-c",
        "echo Collecting x; echo 'ERROR: No matching distribution found for x'; exit 1",
    ]
    with pytest.raises(
        SetupError, match=r"installing x failed: ERROR: No matching distribution found for x"
    ):
        provisioner._step("installing x", command)


def test_a_failed_npm_is_an_error_of_one_sentence(checkout: Path) -> None:
    provisioner = Provisioner(checkout, "dev", Progress())
    provisioner.log.parent.mkdir()
    provisioner.log.touch()
    command = [
        "/bin/sh",
        "-c",
        "echo 'npm error code E404'; echo 'npm error 404 no such package'; echo bye; exit 1",
    ]
    with pytest.raises(SetupError, match=r"installing y failed: npm error 404 no such package"):
        provisioner._step("installing y", command)


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_failed_npm_stops_setup_in_ci_only(checkout: Path, tmp_path: Path, ci: str) -> None:
    """Outside CI setup names the file to remove, and the packages' tests are skipped."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, does in (("node", "exit 0"), ("npm", "echo 'npm error network'; exit 1")):
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    body = (
        "import sys; sys.path.insert(0, 'ops/tools')\n"
        "from provision import Progress, Provisioner\nfrom pathlib import Path\n"
        "Path('.cache').mkdir(); Path('.cache/setup.log').touch()\n"
        "Provisioner(Path('.').resolve(), 'dev', Progress())._install_node_packages()\n"
    )
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "CI": ci}
    done = subprocess.run(
        [sys.executable, "-c", body],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "npm error network" in done.stderr
    assert (done.returncode == 0) is (ci == "")
    assert (".tokenmill-dev to try again" in done.stderr) is (ci == "")


def test_a_second_setup_waits_for_the_first_and_builds_nothing(checkout: Path) -> None:
    (checkout / ".cache").mkdir()
    with (checkout / ".cache" / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        body = (
            "import sys; sys.path.insert(0, 'ops/tools')\n"
            "from provision import Progress, Provisioner\nfrom pathlib import Path\n"
            "Provisioner(Path('.').resolve(), 'demo', Progress()).run('the stamp')\n"
        )
        second = subprocess.Popen(
            [sys.executable, "-c", body], cwd=checkout, stderr=subprocess.PIPE, text=True
        )
        assert second.stderr is not None
        assert "waiting for another setup" in second.stderr.readline()
        assert second.poll() is None, "it must wait for the lock"
        (checkout / ".venv").mkdir()
        (checkout / ".venv" / ".tokenmill-demo").write_text("the stamp")
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert not (checkout / ".venv" / "bin").exists()
