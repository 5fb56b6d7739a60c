"""SQLite databases at this version's schema: one is migrated, the others are copies of its file."""

import functools
import tempfile
from pathlib import Path


@functools.cache
def _migrated() -> bytes:
    from tokenmill_worker.record import migrate  # not for a worker's process: a third of its start

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "migrated.db"
        migrate.upgrade(f"sqlite:///{file}")
        assert [path.name for path in file.parent.iterdir()] == [file.name], "all is in one file"
        return file.read_bytes()


def migrated_sqlite(file: Path) -> str:
    """Make a database that has this version's schema and no rows; return its URL."""
    file.write_bytes(_migrated())
    return f"sqlite:///{file}"
