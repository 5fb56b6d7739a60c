"""The repository's own rules, and that they can fail."""

from pathlib import Path

import pytest

from ops.house_rules import MAX_LINES, REGISTRY_HOSTS, problems


@pytest.mark.parametrize("host", REGISTRY_HOSTS)
def test_registry_hosts_are_found(tmp_path: Path, host: str) -> None:
    path = tmp_path / "pip.conf"
    path.write_text(f"[global]\nindex = https://{host}/simple\n")
    assert list(problems(path, "pip.conf")) == [f"pip.conf:2: names the registry host {host}"]


def test_long_sources_are_found(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("x = 1\n" * MAX_LINES)
    assert list(problems(path, "long.py")) == []
    path.write_text("x = 1\n" * (MAX_LINES + 1))
    assert list(problems(path, "long.py")) == [f"long.py: {MAX_LINES + 1} lines, {MAX_LINES} at most"]


def test_binary_files_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    assert list(problems(path, "image.png")) == []
