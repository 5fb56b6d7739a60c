"""The commands `tokenmill keys`: who may use the gateway, and how much."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated

import typer

from tokenmill.cli.output import emit, say
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError
from tokenmill_gateway.keys import PERMISSIONS, ApiKey, KeyStore
from tokenmill_gateway.options import (
    DATABASE,
    REDIS,
    DatabaseUrl,
    Json,
    KeyPrefix,
    KeySecret,
    RedisUrl,
)
from tokenmill_gateway.queues import limit_everywhere
from tokenmill_schemas.job import Priority
from tokenmill_schemas.webhook import redacted_url

keys = typer.Typer(
    help="Create, list, rotate and revoke API keys of the gateway; set a tenant's limits.",
    no_args_is_help=True,
)


@keys.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key stands for.")],
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="Model that it may use; repeatable. None: all.")
    ] = None,
    priority: Annotated[Priority, typer.Option(help="Class of requests without a tier.")] = (
        Priority.STANDARD
    ),
    read_only: Annotated[bool, typer.Option("--read-only", help="It may only read.")] = False,
    days: Annotated[float | None, typer.Option(min=0, help="Days until it expires.")] = None,
    database_url: DatabaseUrl = DATABASE,
    key_secret: KeySecret = "",
    as_json: Json = False,
) -> None:
    """Create a key, and print it: it is shown this once."""
    expires_ms = None if days is None else _after(days * 86_400)
    with closing(KeyStore(database_url, key_secret)) as store:
        key, text = store.create(
            tenant,
            label=label,
            models=model or (),
            priority=priority,
            permission=PERMISSIONS[1 if read_only else 0],
            expires_ms=expires_ms,
        )
    _show(key, text, as_json=as_json)


@keys.command(name="list")
def list_(
    tenant: Annotated[str | None, typer.Argument(help="Tenant; none: all.")] = None,
    database_url: DatabaseUrl = DATABASE,
    as_json: Json = False,
) -> None:
    """List keys, the newest first; never their text."""
    with closing(KeyStore(database_url, "")) as store:
        found = store.list(tenant)
    if as_json:
        emit(found)
        return
    for key in found:
        say(f"{key.id}  {key.tenant}  {_state(key)}  {key.permission}  {key.label}")


@keys.command()
def rotate(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key.")],
    hours: Annotated[
        float, typer.Option(min=0, max=87_600, help="Hours for which the old key works on.")
    ] = 24.0,
    database_url: DatabaseUrl = DATABASE,
    key_secret: KeySecret = "",
    as_json: Json = False,
) -> None:
    """Create a key like another one, which then ends, and print it: it is shown this once."""
    with closing(KeyStore(database_url, key_secret)) as store:
        key, text = store.rotate(key_id, _after(hours * 3_600))
    _show(key, text, as_json=as_json)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key.")],
    database_url: DatabaseUrl = DATABASE,
) -> None:
    """Revoke a key; gateways refuse it within 10 seconds."""
    with closing(KeyStore(database_url, "")) as store:
        key = store.revoke(key_id)
    say(f"key {key.id} of {key.tenant} is revoked")


@keys.command()
def limit(
    tenant: Annotated[str, typer.Argument(help='Tenant; "*": each without limits of its own.')],
    rate: Annotated[float | None, typer.Option(help="Requests a second.")] = None,
    burst: Annotated[float | None, typer.Option(help="Requests at once, before rate.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Answers that run at once.")] = None,
    weight: Annotated[float | None, typer.Option(help="Share beside other tenants.")] = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Queue, repeatable. None: all, also later ones.")
    ] = None,
    redis_url: RedisUrl = REDIS,
    key_prefix: KeyPrefix = "tm:",
) -> None:
    """Set a tenant's limits in each queue; 0 removes one, and one that is not named stays."""
    limits = {"rate": rate, "burst": burst, "concurrency": concurrency, "weight": weight}
    if all(value is None for value in limits.values()):
        raise ConfigurationError("name a limit: --rate, --burst, --concurrency or --weight")
    wrong = [name for name, value in limits.items() if value is not None and not value >= 0]
    if wrong:
        raise ConfigurationError(f"a limit is at least 0, or 0 for none: --{wrong[0]}")
    queues = queue or limit_everywhere(redis_url, key_prefix, tenant, limits)
    for name in queues:
        with Client(redis_url, queue=name, prefix=key_prefix) as client:
            client.set_limits(
                tenant, rate=rate, burst=burst, concurrency=concurrency, weight=weight
            )
    later = [] if queue else ["every queue that comes"]
    say(f"the limits of {tenant} are set in {', '.join([*queues, *later])}")


@keys.command()
def webhook(
    tenant: Annotated[str, typer.Argument(help="Tenant.")],
    url: Annotated[str | None, typer.Argument(help="Its URL; none: no webhooks any more.")] = None,
    database_url: DatabaseUrl = DATABASE,
) -> None:
    """Send the ends of a tenant's background responses and batches to a URL.

    `tokenmill webhooks secret --tenant TENANT` prints the secret that signs them.
    """
    with closing(KeyStore(database_url, "")) as store:
        store.set_webhook(tenant, url)
    say(
        f"the webhooks of {tenant} go to {redacted_url(url)}" if url else f"{tenant} has no webhook"
    )


def _after(seconds: float) -> int:
    """Return the time in so many seconds, in Unix milliseconds."""
    return round((time.time() + seconds) * 1000)


def _show(key: ApiKey, text: str, *, as_json: bool) -> None:
    if as_json:
        emit({"id": key.id, "key": text, "tenant": key.tenant})
    else:
        say(text)


def _state(key: ApiKey) -> str:
    if key.revoked_ms is not None:
        return "revoked"
    is_over = key.expires_ms is not None and key.expires_ms <= time.time() * 1000
    return "expired" if is_over else "valid"
