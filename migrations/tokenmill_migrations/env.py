"""Entry point of Alembic: runs the revisions on the connection that it receives.

migrations/README.md has the command that writes a new revision against the database that
`-x url=…` names.
"""

from alembic import context

from tokenmill.sql.engine import open_engine
from tokenmill_schemas.tables import metadata


def _run(connection: object) -> None:
    context.configure(
        connection=connection,  # type: ignore[arg-type]
        target_metadata=metadata,
        render_as_batch=True,  # SQLite changes a table by copying it
        compare_type=True,
        # PostgreSQL: some revisions run outside a transaction; SQLite: all run in the caller's
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    raise SystemExit(
        "offline mode is not supported: the revisions look at the database they change"
    )
_connection = context.config.attributes.get("connection")
if _connection is not None:
    _run(_connection)
else:
    with open_engine(context.get_x_argument(as_dictionary=True)["url"]).connect() as _opened:
        _run(_opened)
