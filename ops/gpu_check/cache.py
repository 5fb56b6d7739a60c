"""Carries Triton's compiled kernels from one call to the next, in one tar file."""

import tarfile
from pathlib import Path

MOST_BYTES = 15 << 20


def restore(archive: Path, folder: Path) -> str:
    """Unpack the carried cache into Triton's folder; return what happened, in a few words."""
    if not archive.exists():
        return "nothing was carried"
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as error:
        return f"the carried cache is unusable: {error}"
    return f"restored {archive.stat().st_size / 2**20:.1f} MiB"


def save(folder: Path, archive: Path) -> str:
    """Pack Triton's folder without its intermediate languages; return what happened.

    A cache that would be too large is not kept.
    """
    kept = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".ttgir"
    ]
    if not kept:
        return "nothing was compiled"
    with tarfile.open(archive, "w:xz", preset=1) as tar:
        for path in kept:
            tar.add(path, path.relative_to(folder))
    size = archive.stat().st_size
    if size > MOST_BYTES:
        archive.unlink()
        return f"too large to carry: {size / 2**20:.1f} MiB"
    return f"{len(kept)} files, {size / 2**20:.1f} MiB in {archive.name}"
