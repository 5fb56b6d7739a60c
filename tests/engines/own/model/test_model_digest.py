"""Tests of what tells two models' files apart."""

import os
import random
from pathlib import Path

import pytest

from tokenmill_worker.engines.own.model.model_digest import model_digest

SIZE = 3_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"layers": 2}')
    (tmp_path / "model.safetensors").write_bytes(random.Random(0).randbytes(SIZE))
    (tmp_path / "notes.txt").write_text("not a part of the model")
    return tmp_path


def rewrite(path: Path, data: bytes) -> None:
    """Replace a file's content and keep its times, as `cp -p` and images of containers do."""
    found = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_the_same_files_have_the_same_digest(folder: Path) -> None:
    before = model_digest(folder)
    (folder / "notes.txt").write_text("changed")
    assert model_digest(folder) == before


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_a_trained_matrix_in_a_file_of_the_same_size_and_time_changes_the_digest(
    folder: Path, place: float
) -> None:
    path, before = folder / "model.safetensors", model_digest(folder)
    data = bytearray(path.read_bytes())
    start = min(int(place * SIZE), SIZE - 20_000)
    for index in range(start, start + 20_000):
        data[index] ^= 1
    rewrite(path, bytes(data))
    assert model_digest(folder) != before


def test_a_small_change_shows_by_the_file_s_time(folder: Path) -> None:
    before = model_digest(folder)
    os.utime(folder / "model.safetensors", (1, 1))
    assert model_digest(folder) != before


def test_another_configuration_changes_the_digest(folder: Path) -> None:
    before = model_digest(folder)
    rewrite(folder / "config.json", b'{"layers": 3}')
    assert model_digest(folder) != before
