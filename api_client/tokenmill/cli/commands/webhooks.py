"""`webhooks list`, `redrive` and `secret`: pending and dead webhooks, and the secret that signs
them.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.connection import ConnectionOptions, Json, connected, limit_of
from tokenmill.cli.output import ago, redrive_all, say, seconds, show_list, state
from tokenmill.webhooks import new_secret, tenant_secret

if TYPE_CHECKING:
    from tokenmill.sql.webhooks import SqlWebhooks, WebhookRow


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="List webhooks, send dead ones again, make secrets (`tokenmill tasks` sends them).",
        no_args_is_help=True,
    )
    group.command("list")(connected(list_webhooks))
    group.command("redrive")(connected(redrive))
    group.command("secret")(secret)
    app.add_typer(group, name="webhooks")


def list_webhooks(
    connection: ConnectionOptions,
    *,
    wanted: Annotated[
        str | None,
        typer.Option(
            "--state", help="List only pending, sending, delivered, dead or superseded ones."
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="List only this tenant.")] = None,
    job: Annotated[str | None, typer.Option(help="List only this job.")] = None,
    limit: Annotated[int, limit_of("webhooks")] = 50,
    json: Json = False,
) -> None:
    """List the webhooks of every queue with their state, the latest first."""
    with _webhooks(connection) as webhooks:
        found = webhooks.list(state=wanted, tenant=tenant, job_id=job, limit=limit)
    tries, when = ("TRIES", "right"), ("WHEN", "right")
    show_list(
        found,
        ["WEBHOOK", "STATE", "EVENT", "TENANT", tries, when, "URL", ""],
        _row,
        "webhook",
        json=json,
    )


def redrive(
    connection: ConnectionOptions,
    webhook: Annotated[
        list[str] | None, typer.Argument(help="Ids of webhooks.", metavar="WEBHOOK")
    ] = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Redrive all dead webhooks, the oldest first.")
    ] = False,
    limit: Annotated[int, limit_of("webhooks with --all")] = 1000,
    json: Json = False,
) -> None:
    """Send dead webhooks again, with the ids that they had."""
    with _webhooks(connection) as webhooks:
        call = partial(webhooks.redrive, limit=limit)
        redrive_all(call, webhook, "webhook", everything=everything, json=json)


def secret(
    *,
    webhook_secret: Annotated[
        str,
        typer.Option(
            envvar="TOKENMILL_WEBHOOK_SECRET", help="Secret of the service.", show_default=False
        ),
    ] = "",
    tenant: Annotated[str, typer.Option(help="Tenant whose receivers use it.")] = "",
    new: Annotated[bool, typer.Option("--new", help="Print a new secret for the service.")] = False,
) -> None:
    """Print the secret with which a tenant's receivers verify webhooks.

    It is derived from the service's secret.
    """
    say((new_secret() if new else tenant_secret(webhook_secret, tenant)) + "\n")


def _webhooks(connection: ConnectionOptions) -> closing[SqlWebhooks]:
    from tokenmill.sql.webhooks import SqlWebhooks

    return closing(SqlWebhooks(connection.database_url))


def _row(row: WebhookRow) -> tuple[object, ...]:
    if row.state == "pending":
        wait_ms = row.due_ms - time.time() * 1000
        when = f"in {seconds(wait_ms)}" if wait_ms > 0 else "due"
    else:
        when = ago(row.delivered_ms or row.ended_ms)
    error = row.last_error if row.state != "delivered" else ""
    return row.id, state(row.state), row.event, row.tenant, row.attempts, when, row.url, error or ""
