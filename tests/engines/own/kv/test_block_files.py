"""Tests of the files of the cache on disk: only a whole file of the right block is used, and no
fault of disk or folder raises.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill_worker.engines.own.config.engine_config import GIB
from tokenmill_worker.engines.own.kv.block_files import FOLDER, BlockFiles

SIZE = 3000
MODEL, OTHER = b"m" * 32, b"o" * 32


def key(number: int) -> bytes:
    return number.to_bytes(1, "big") * 32


def block(number: int, size: int = SIZE) -> bytearray:
    return bytearray(random.Random(number).randbytes(size))


def files_in(folder: Path, model: bytes = MODEL, size: int = SIZE, limit: int = GIB) -> BlockFiles:
    return BlockFiles(folder, model, size, limit)


def read(files: BlockFiles, number: int, size: int = SIZE) -> bytearray | None:
    found = bytearray(size)
    return found if files.read(key(number), found) else None


def paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_a_written_block_is_read_by_the_next_process(tmp_path: Path) -> None:
    assert files_in(tmp_path).write(key(1), block(1))
    files = files_in(tmp_path)
    assert files.has(key(1))
    assert not files.has(key(2))
    assert read(files, 1) == block(1)
    assert read(files, 2) is None
    assert not files.failures.total()


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.write(key(1), block(1))
    assert files.write(key(1), block(1))
    assert files.num_written == 1


def test_blocks_of_another_model_are_not_found(tmp_path: Path) -> None:
    files_in(tmp_path).write(key(1), block(1))
    assert read(files_in(tmp_path, OTHER), 1) is None


def test_folders_and_files_are_of_their_user_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        files_in(tmp_path / "new").write(key(1), block(1))
    finally:
        os.umask(old)
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_folder_that_others_may_enter_is_closed_and_one_of_another_kind_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / FOLDER).mkdir(mode=0o755)
    files_in(tmp_path)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / FOLDER).symlink_to(tmp_path)
    with pytest.raises(OSError, match=FOLDER):
        files_in(tmp_path / "b")


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_is_never_used_and_is_removed(tmp_path: Path, seed: int) -> None:
    """Bits are flipped, and bytes are cut off, added and moved, anywhere in the file."""
    chance = random.Random(seed)
    files = files_in(tmp_path)
    for count in range(1, 60):
        files.write(key(1), block(1))
        path = paths(tmp_path)[0]
        data = bytearray(path.read_bytes())
        place = chance.choice([chance.randrange(120), chance.randrange(len(data))])
        match chance.randrange(5):
            case 0:
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = chance.randbytes(chance.randrange(1, 50))
            case 3:
                del data[place]
                data.append(data[-1] ^ 1)
            case 4:
                data[place : place + 40] = bytes(255 - byte for byte in data[place : place + 40])
        path.write_bytes(data)
        assert read(files, 1) is None
        assert files.failures["damaged"] == count
        assert not paths(tmp_path)


def test_files_that_changed_places_are_never_used(tmp_path: Path) -> None:
    files, other = files_in(tmp_path), files_in(tmp_path, OTHER)
    for number in (1, 2):
        files.write(key(number), block(number))
    other.write(key(3), block(3))
    first, second = paths(tmp_path / FOLDER / MODEL.hex())
    third = paths(tmp_path / FOLDER / OTHER.hex())[0]
    spare = tmp_path / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    foreign = files._path(key(3))
    foreign.parent.mkdir()
    shutil.copy(third, foreign)  # the right name in the folder of a wrong model
    assert [read(files, number) for number in (1, 2, 3)] == [None] * 3
    assert files.failures["damaged"] == 3
    assert read(other, 3) == block(3)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "empty", "unreadable"])
def test_something_else_in_a_file_s_place_is_a_miss(tmp_path: Path, kind: str) -> None:
    files = files_in(tmp_path)
    path = files._path(key(1))
    path.parent.mkdir()
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            (tmp_path / "target").write_bytes(b"x")
            path.symlink_to(tmp_path / "target")
        case "empty":
            path.touch()
        case "unreadable":
            path.touch(mode=0o000)
    assert read(files, 1) is None
    assert files.failures.total() == 1
    files.write(key(1), block(1))  # whatever comes of it
    assert read(files, 1) in (None, block(1))


def test_the_folder_is_bounded_and_the_least_recently_used_blocks_go_first(
    tmp_path: Path,
) -> None:
    limit = 40 * SIZE
    files_in(tmp_path, OTHER).write(key(200), block(200))  # of another model, and the oldest
    os.utime(paths(tmp_path)[0], (time.time() - 5000,) * 2)
    files = files_in(tmp_path, limit=limit)
    for number in range(120):
        files.write(key(number), block(number))
        age = 1000 - number
        os.utime(files._path(key(number)), (time.time() - age,) * 2)
        if number >= 1:
            assert read(files, 0) == block(0)  # a hit makes it young
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= limit
    kept = [number for number in range(120) if files.has(key(number))]
    assert kept == [0, *range(kept[1], 120)]
    assert len(kept) > 30
    assert not files_in(tmp_path, OTHER).has(key(200))
    assert files.num_written == 120


def test_unfinished_files_of_ended_processes_are_removed(tmp_path: Path) -> None:
    files = files_in(tmp_path, limit=4 * SIZE)
    old, new = (files._home / f"{name}.tmp" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    for number in range(6):
        files.write(key(number), block(number))
    assert not old.exists()
    assert new.exists()


def full(files: BlockFiles, size: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
    try:
        assert not files.write(key(1), block(1, size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_survived_and_counted_and_leaves_nothing_behind(tmp_path: Path) -> None:
    size = 8 << 20
    files = files_in(tmp_path, size=size)
    full(files, size)
    assert files.failures["full"] == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files.write(key(1), block(1, size))
    assert read(files, 1, size) == block(1, size)


def as_file(root: Path) -> None:
    shutil.rmtree(root)
    root.write_bytes(b"a file")


@pytest.mark.parametrize(
    ("destroy", "is_written"), [(shutil.rmtree, True), (as_file, False)], ids=["removed", "file"]
)
def test_a_folder_that_vanishes_is_survived(
    tmp_path: Path, destroy: Callable[[Path], None], is_written: bool
) -> None:
    files = files_in(tmp_path)
    files.write(key(1), block(1))
    destroy(tmp_path / FOLDER)
    assert read(files, 1) is None
    assert not files.has(key(1))
    assert files.write(key(2), block(2)) is is_written
    assert (read(files, 2) == block(2)) is is_written
    assert bool(files.failures["io"]) is not is_written
