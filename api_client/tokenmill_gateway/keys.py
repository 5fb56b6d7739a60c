"""API keys: how one is made, and whom it stands for.

A key is `tmk-`, its id, and 256 random bits. The database has an HMAC of it, so that a copy of the
database opens nothing; with that many bits a slow hash would add no safety.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from tokenmill.errors import ConfigurationError
from tokenmill.sql.database import Database
from tokenmill_gateway.refusals import HttpRefusal
from tokenmill_gateway.threads import in_thread
from tokenmill_schemas.job import Priority
from tokenmill_schemas.tables import api_keys, tenant_webhooks
from tokenmill_schemas.validation import MAX_NAME_CHARS, webhook_problem

FORM: Final = re.compile(r"tmk-([a-z2-7]{8})-([A-Za-z0-9_-]{43})", re.ASCII)
REMEMBERED_S: Final = 10.0  # a revoked key works so long at most
_MOST_REMEMBERED: Final = 10_000
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz234567"
PERMISSIONS: Final = ("all", "read")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is recorded. `models`: those that it may use; empty: all. Times are Unix
    milliseconds.
    """

    id: str
    tenant: str
    label: str = ""
    models: tuple[str, ...] = ()
    priority: Priority = Priority.STANDARD  # of requests that name no tier
    permission: str = "all"
    created_ms: int = 0
    expires_ms: int | None = None
    revoked_ms: int | None = None
    webhook: str | None = None  # the tenant's URL for the ends of background responses and batches

    @property
    def may_write(self) -> bool:
        return self.permission == "all"

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models


_COLUMNS: Final = frozenset(api_keys.c.keys())
_KEYS: Final = sa.select(api_keys, tenant_webhooks.c.url.label("webhook")).outerjoin(
    tenant_webhooks, tenant_webhooks.c.tenant == api_keys.c.tenant
)
OPEN: Final = ApiKey(id="", tenant="")  # of every request, where no key is asked for


def new_key() -> tuple[str, str]:
    """Return the id of a new key, and the key."""
    key_id = "".join(secrets.choice(_LETTERS) for _ in range(8))
    return key_id, f"tmk-{key_id}-{secrets.token_urlsafe(32)}"


def hash_of(key: str, secret: str) -> bytes:
    return hmac.digest(secret.encode(), key.encode(), hashlib.sha256)


@dataclass(frozen=True, slots=True)
class _Remembered:
    until: float
    hash: bytes
    key: ApiKey | None


class KeyStore:
    """The keys in one database; its calls wait for it, in the threads that make them."""

    def __init__(self, url: str, secret: str) -> None:
        self._database = Database(url)
        self._secret = secret

    def create(
        self,
        tenant: str,
        *,
        label: str = "",
        models: Sequence[str] = (),
        priority: Priority = Priority.STANDARD,
        permission: str = "all",
        expires_ms: int | None = None,
    ) -> tuple[ApiKey, str]:
        """Record a new key, and return it with its text, which is nowhere else. Raises
        ConfigurationError.
        """
        if not 0 < len(tenant) <= MAX_NAME_CHARS or not tenant.isprintable():
            words = f"a tenant's name has 1 to {MAX_NAME_CHARS} printable characters: {tenant!r}"
            raise ConfigurationError(words)
        key_id, text = new_key()
        key = ApiKey(
            id=key_id,
            tenant=tenant,
            label=label,
            models=tuple(models),
            priority=priority,
            permission=permission,
            created_ms=_now_ms(),
            expires_ms=expires_ms,
        )
        row = {name: value for name, value in msgspec.to_builtins(key).items() if name in _COLUMNS}
        row["hash"] = hash_of(text, self._secret)
        with self._database.connection() as connection:
            connection.execute(api_keys.insert().values(row))
        return key, text

    def list(self, tenant: str | None = None) -> list[ApiKey]:
        """Return the keys of a tenant, or of all; the newest first."""
        statement = _KEYS.order_by(api_keys.c.created_ms.desc(), api_keys.c.id)
        if tenant is not None:
            statement = statement.where(api_keys.c.tenant == tenant)
        with self._database.connection() as connection:
            return [_key(dict(row)) for row in connection.execute(statement).mappings()]

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key. Raises ConfigurationError if there is none with this id."""
        change = api_keys.update().where(api_keys.c.id == key_id, api_keys.c.revoked_ms.is_(None))
        with self._database.connection() as connection:
            connection.execute(change.values(revoked_ms=_now_ms()))
        found = self.read(key_id)
        if found is None:
            raise ConfigurationError(f"there is no key {key_id}")
        return found[0]

    def rotate(self, key_id: str, until_ms: int) -> tuple[ApiKey, str]:
        """Record a new key like this one, which ends at `until_ms` unless it ends before; return
        the new one with its text. Raises ConfigurationError if there is none that opens.
        """
        found = self.read(key_id)
        if found is None or not _is_valid(found[0]):
            raise ConfigurationError(f"there is no key {key_id} that is neither revoked nor over")
        old = found[0]
        made = self.create(
            old.tenant,
            label=old.label,
            models=old.models,
            priority=old.priority,
            permission=old.permission,
            expires_ms=old.expires_ms,
        )
        ends_ms = until_ms if old.expires_ms is None else min(until_ms, old.expires_ms)
        change = api_keys.update().where(api_keys.c.id == key_id).values(expires_ms=ends_ms)
        with self._database.connection() as connection:
            connection.execute(change)
        return made

    def read(self, key_id: str) -> tuple[ApiKey, bytes] | None:
        """Return a key and its hash."""
        statement = _KEYS.where(api_keys.c.id == key_id)
        with self._database.connection() as connection:
            row = connection.execute(statement).mappings().first()
        return None if row is None else (_key(dict(row)), bytes(row["hash"]))

    def set_webhook(self, tenant: str, url: str | None) -> None:
        """Set the URL of a tenant; None removes it. Raises ConfigurationError."""
        if url is not None and (problem := webhook_problem(url)):
            raise ConfigurationError(problem)
        with self._database.connection() as connection:
            connection.execute(tenant_webhooks.delete().where(tenant_webhooks.c.tenant == tenant))
            if url is not None:
                connection.execute(tenant_webhooks.insert().values(tenant=tenant, url=url))

    def opens(self, text: str) -> bool:
        """Return whether a key is valid."""
        form = FORM.fullmatch(text)
        found = self.read(form[1]) if form else None
        return (
            found is not None
            and _is_valid(found[0])
            and hmac.compare_digest(found[1], self.hash_of(text))
        )

    def hash_of(self, text: str) -> bytes:
        return hash_of(text, self._secret)

    def close(self) -> None:
        self._database.close()


class KeyRing:
    """Finds the key of a request. It remembers each for a while, so that a burst asks once."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()

    async def find(self, text: str) -> ApiKey:
        """Return the key. Raises HttpRefusal, in the same words for each that opens nothing."""
        form = FORM.fullmatch(text)
        if form is None:
            raise wrong_key()
        one = self._remembered.get(form[1])
        if one is None or one.until <= time.monotonic():
            until = time.monotonic() + REMEMBERED_S  # from before the database was asked
            found = await in_thread(lambda: self._store.read(form[1]))
            key, digest = found or (None, b"")
            one = _Remembered(until, digest, key)
            self._remembered[form[1]] = one
            self._remembered.move_to_end(form[1])
            if len(self._remembered) > _MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        is_right = hmac.compare_digest(one.hash, self._store.hash_of(text))
        if one.key is None or not is_right or not _is_valid(one.key):
            raise wrong_key()
        return one.key

    def close(self) -> None:
        self._store.close()


def wrong_key() -> HttpRefusal:
    words = "no API key, or one that is wrong, expired or revoked: Authorization: Bearer KEY"
    return HttpRefusal.of(401, "invalid_api_key", words)


def _is_valid(key: ApiKey) -> bool:
    is_over = key.expires_ms is not None and key.expires_ms <= _now_ms()
    return key.revoked_ms is None and not is_over


def _key(row: dict[str, Any]) -> ApiKey:
    return msgspec.convert({name: row[name] for name in ApiKey.__struct_fields__}, ApiKey)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
