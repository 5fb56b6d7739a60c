"""ops/secrets writes a random password for every role, once; without them neither compose nor
kustomize starts. It prints a user for one queue alone.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SECRETS = ROOT / "ops" / "secrets"
COMPOSE = (ROOT / "docker-compose.yml").read_text()


def write(kind: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SECRETS, kind, folder], capture_output=True, text=True, check=False)


def values_of(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def test_a_different_password_is_written_for_each_name(tmp_path: Path) -> None:
    assert write("compose", tmp_path).returncode == 0
    values = values_of(tmp_path / ".env")
    assert set(values) == set(re.findall(r"\$\{(\w+):\?", COMPOSE))
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in values.values())
    other = tmp_path / "other"
    other.mkdir()
    write("compose", other)
    assert len({*values.values(), *values_of(other / ".env").values()}) == 2 * len(values)


def test_a_missing_password_stops_the_start() -> None:
    """No name with PASSWORD has a default, in whatever way it is written."""
    named = re.findall(r"\$\{?(\w*PASSWORD\w*)(:\?)?", COMPOSE)
    assert named
    assert {name for name, is_required in named if not is_required} == set()


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("compose", [".env"]),
        ("users", ["users.acl"]),
        ("kubernetes", ["secret.env", "users.acl"]),
    ],
)
def test_files_are_private_and_never_overwritten(
    tmp_path: Path, kind: str, files: list[str]
) -> None:
    assert write(kind, tmp_path).stdout.split() == [str(tmp_path / name) for name in files]
    before = {name: (tmp_path / name).read_bytes() for name in files}
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in files} == {0o600}
    for name in files:  # also where only one of them is there
        again = write(kind, tmp_path)
        assert (again.returncode, again.stdout) == (1, "")
        assert "nothing was written" in again.stderr
        assert {left.name: left.read_bytes() for left in tmp_path.iterdir()} == before
        (tmp_path / name).unlink()
        before.pop(name)
        if not before:
            break


def test_git_ignores_the_files_with_secrets() -> None:
    lines = (ROOT / ".gitignore").read_text().splitlines()
    here = {line.removeprefix("/") for line in lines}
    assert {".env", "users.acl", "ops/deploy/k8s/secret.env", "ops/deploy/k8s/users.acl"} <= here


def test_the_image_build_gets_only_the_files_that_it_copies() -> None:
    first, *rest = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"
    ]
    assert first == "*"
    named = {line[1:] for line in rest if line.startswith("!")}
    copied = {
        source
        for path in (ROOT / "ops/deploy").glob("*Dockerfile")
        for sources in re.findall(r"^COPY (?!--)(.+) \S+$", path.read_text(), re.MULTILINE)
        for source in sources.split()
    }
    assert named == copied


def test_the_kubernetes_users_have_the_passwords_of_the_secret(tmp_path: Path) -> None:
    write("kubernetes", tmp_path)
    rules, secret = (tmp_path / "users.acl").read_text(), values_of(tmp_path / "secret.env")
    assert "change-me" not in rules + str(secret)
    for role in ("worker", "reader", "tasks", "gateway"):
        (password,) = re.findall(rf"redis://{role}:(\w+)@", secret[f"redis-{role}"])
        assert f"user {role} on >{password} " in rules


def test_no_applied_kubernetes_file_has_a_password() -> None:
    kustomization = yaml.safe_load((ROOT / "ops/deploy/k8s/kustomization.yaml").read_text())
    assert [each["envs"] for each in kustomization["secretGenerator"]] == [["secret.env"]]
    applied = [(ROOT / "ops/deploy/k8s" / name).read_text() for name in kustomization["resources"]]
    assert not [text for text in applied if "change-me" in text or "kind: Secret" in text]


def test_the_variables_that_an_older_dot_env_lacks_are_printed(tmp_path: Path) -> None:
    write("compose", tmp_path)
    assert write("missing", tmp_path).stdout == ""
    path = tmp_path / ".env"
    kept = [line for line in path.read_text().splitlines(keepends=True) if "GATEWAY" not in line]
    path.write_text("".join(kept))
    lacking = write("missing", tmp_path).stdout
    path.write_text("".join(kept) + lacking)
    assert set(values_of(path)) == set(re.findall(r"\$\{(\w+):\?", COMPOSE))
    assert len(lacking.splitlines()) == 3
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in values_of(path).values())


def test_an_unknown_kind_of_secrets_is_refused(tmp_path: Path) -> None:
    assert write("nomad", tmp_path).returncode == 2


def test_every_user_of_the_list_has_its_own_password(tmp_path: Path) -> None:
    write("users", tmp_path)
    rules = (tmp_path / "users.acl").read_text()
    passwords = re.findall(r"^user \w+ on >([0-9a-f]{48}) ", rules, re.MULTILINE)
    assert "change-me" not in rules
    assert len(set(passwords)) == len(passwords) == len(rules.splitlines()) - 1


def queue_user(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(SECRETS), "queue", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("queue", "user"), [("my-queue", "producer-my-queue"), ("org/m.1", "producer-org-m.1")]
)
def test_the_user_of_one_queue_has_a_producer_s_rights_there(queue: str, user: str) -> None:
    shipped = (ROOT / "ops/deploy/redis/users.acl").read_text()
    (producer,) = re.findall(r"^user producer on >\S+ (.*)$", shipped, re.MULTILINE)
    first, second = (queue_user(queue).stdout for _ in range(2))
    found = re.fullmatch(rf"user {re.escape(user)} on >([0-9a-f]{{48}}) (.*)\n", first)
    assert found is not None
    assert found[2] == producer.replace("{*}", f"{{{queue}}}")
    assert first != second


@pytest.mark.parametrize("arguments", [(), ("",), ("a*",), ("a b",), ("a?",), ("[a]",), ("a}:b",)])
def test_a_queue_whose_name_is_a_pattern_is_refused_a_user(arguments: tuple[str, ...]) -> None:
    done = queue_user(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
