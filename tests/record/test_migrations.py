"""Revisions and tables agree on both databases; a start refuses only schemas too old for it."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from tests.record.support import reading, rows
from tests.support.pages import ROOT, blocks, run_shell
from tokenmill.sql.engine import open_engine
from tokenmill_schemas.tables import metadata
from tokenmill_worker.errors import SchemaOutdated, StoreUnavailable
from tokenmill_worker.record import ResultStore
from tokenmill_worker.record.migrate import configuration, downgrade, upgrade
from tokenmill_worker.record.schema_version import read_schema_version, revisions


def test_the_migrated_schema_equals_the_tables(url: str) -> None:
    with reading(url) as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "target_metadata": metadata}
        )
        assert compare_metadata(context, metadata) == []


def test_primary_keys_and_columns_are_those_of_the_tables(url: str) -> None:
    """Primary keys, nullability of every column and column order are not compared by alembic."""
    with reading(url) as connection:
        inspector = sa.inspect(connection)
        for table in metadata.tables.values():
            found = inspector.get_columns(table.name)
            assert [(c["name"], c["nullable"]) for c in found] == [
                (c.name, c.nullable) for c in table.columns
            ]
            key = inspector.get_pk_constraint(table.name)["constrained_columns"]
            assert key == [column.name for column in table.primary_key.columns]


def test_migration_files_are_named_after_their_revisions() -> None:
    scripts = ScriptDirectory.from_config(configuration())
    assert revisions() == [script.revision for script in scripts.walk_revisions()][::-1]
    assert scripts.get_heads() == revisions()[-1:]


def test_the_revision_read_equals_alembic_s(empty_url: str) -> None:
    for revision in [None, *revisions()]:
        if revision is not None:
            upgrade(empty_url, revision)
        with reading(empty_url) as connection:
            found = read_schema_version(connection)
            assert (
                found.current
                == revision
                == MigrationContext.configure(connection).get_current_revision()
            )
            assert found.is_behind == (revision != revisions()[-1])


def test_a_worker_does_not_import_alembic() -> None:
    """Its import costs a start as much as SQLAlchemy's; only migrations need it."""
    program = "import sys, tokenmill_worker.app, tokenmill_worker.record"
    program += "; print('alembic' in sys.modules, 'sqlalchemy' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert said.stdout.split() == ["False", "True"]


def test_upgrading_twice_changes_nothing(empty_url: str) -> None:
    before, after = upgrade(empty_url)
    assert before is None
    assert upgrade(empty_url) == (after, after)


def test_concurrent_upgrades_apply_each_revision_once(empty_url: str) -> None:
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(upgrade(empty_url))
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, head = upgrade(empty_url)
    assert sorted(map(str, outcomes)) == [f"('{head}', '{head}')"] * 3 + [f"(None, '{head}')"]


async def test_a_start_on_an_empty_database_names_the_command(empty_url: str) -> None:
    store = ResultStore(empty_url, queue="q")
    with pytest.raises(SchemaOutdated, match="tokenmill db upgrade"):
        await store.check()
    upgrade(empty_url)
    await store.check()
    await store.close()


async def test_a_database_of_a_newer_version_is_accepted(url: str) -> None:
    """A rolling upgrade: the database goes first, workers of both versions run on it."""
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(sa.text("ALTER TABLE jobs ADD COLUMN invented_later INTEGER"))
    engine.dispose()
    store = ResultStore(url, queue="q")
    await store.check()
    await store.close()
    assert upgrade(url) == ("9999", "9999")


async def test_an_unreachable_database_at_the_start_is_a_retryable_error() -> None:
    store = ResultStore("postgresql://nobody@127.0.0.1:1/none", queue="q")
    with pytest.raises(StoreUnavailable, match="cannot be used: connection failed"):
        await store.check()
    await store.close()


def test_a_downgrade_to_base_drops_every_table(url: str) -> None:
    downgrade(url, "base")
    with reading(url) as connection:
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]
        assert read_schema_version(connection).is_behind


def test_the_folder_of_a_new_sqlite_file_is_created(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/folder/tokenmill.db"
    upgrade(url)
    assert rows(url, "SELECT count(*) AS n FROM jobs") == [{"n": 0}]


async def test_the_page_s_commands_write_an_empty_revision(tmp_path: Path) -> None:
    """The tables equal the newest revision, so the new one is empty."""
    shutil.copytree(ROOT / "migrations", tmp_path / "migrations")
    ((_, commands),) = blocks(ROOT / "migrations" / "README.md")
    commands = commands.replace("/tmp/new.db", str(tmp_path / "new.db"))
    done = await run_shell(commands, tmp_path, "redis://unused", "sqlite:///unused")
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "migrations").rglob("0009_*.py")
    assert "op." not in written.read_text()
