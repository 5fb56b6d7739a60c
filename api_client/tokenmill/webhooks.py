"""Signs and verifies webhooks in the form of Standard Webhooks, for senders and receivers.

    event = webhooks.verify(body, headers, secret)   # in the receiver; raises BadSignature

A message has an id that stays the same at every attempt; a receiver remembers it to act only once.
Its time of sending is signed too, and a message that is too old or too far in the future is
rejected. A secret is "whsec_" and base64. Several secrets, separated by spaces, are all accepted
and all used for signing, so that a secret can be changed without a gap. A tenant's secret is
derived from the service's, so that one receiver cannot sign for another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from tokenmill.errors import ConfigurationError, TokenmillError
from tokenmill_schemas.webhook import WebhookEvent

TOLERANCE_S: Final = 300
_PREFIX: Final = "whsec_"
_LEAST_KEY_BYTES: Final = 16
# longest time accepted: more digits may exceed a float or Python's limit for integers
_MOST_DIGITS: Final = 15
_MOST_SIGNATURES: Final = 16  # one for each secret of the sender; more are not looked at
_decoder = msgspec.json.Decoder(WebhookEvent)


class BadSignature(TokenmillError, ValueError):
    """The message was not signed with the secret, its time is out of range, or it cannot be
    read.
    """


def verify(
    body: bytes,
    headers: Mapping[str, str],
    secret: str,
    *,
    tolerance_s: float = TOLERANCE_S,
    now: float | None = None,
) -> WebhookEvent:
    """Return the event of a signed message. Raises BadSignature.

    Args:
        body: the bytes as received, unparsed.
        headers: all headers, with names in any case.
        secret: one secret, or several separated by spaces.
        tolerance_s: largest accepted difference between the time of sending and now, in seconds.
    """
    given = {name.lower(): value for name, value in headers.items()}
    missing = [
        name
        for name in ("webhook-id", "webhook-timestamp", "webhook-signature")
        if not given.get(name)
    ]
    if missing:
        raise BadSignature(f"the message has no {', '.join(missing)}")
    message_id, sent, signatures = (
        given[f"webhook-{name}"] for name in ("id", "timestamp", "signature")
    )
    if not (sent.isascii() and sent.isdigit() and len(sent) <= _MOST_DIGITS):
        raise BadSignature(f"the message's time is {sent[:32]!r}, not seconds since 1970")
    age_s = (time.time() if now is None else now) - int(sent)
    if abs(age_s) > tolerance_s:
        raise BadSignature(
            f"the message was sent {age_s:.0f} s ago; {tolerance_s:g} s are tolerated"
        )
    expected = [item.encode() for item in sign(message_id, int(sent), body, secret).split()]
    # Compare all pairs without stopping at a match, so that the duration reveals nothing.
    first_ones = signatures.split(maxsplit=_MOST_SIGNATURES)[:_MOST_SIGNATURES]
    matches = [hmac.compare_digest(one.encode(), other) for one in first_ones for other in expected]
    if not any(matches):
        raise BadSignature("no signature of the message fits the secret")
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise BadSignature(f"the message is signed and cannot be read: {error}") from error


def sign(message_id: str, timestamp: int, body: bytes, secret: str) -> str:
    """Return the header `webhook-signature`: one signature per secret. Raises
    ConfigurationError.
    """
    content = f"{message_id}.{timestamp}.".encode() + body
    digests = (hmac.digest(key, content, hashlib.sha256) for key in _keys(secret))
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def tenant_secret(secret: str, tenant: str) -> str:
    """Return the secret for the receivers of a tenant; for the tenant without a name, the service's
    own.
    """
    if not tenant:
        _keys(secret)
        return secret
    derived = (
        hmac.digest(key, b"tenant:" + tenant.encode(), hashlib.sha256) for key in _keys(secret)
    )
    return " ".join(_PREFIX + base64.b64encode(key).decode() for key in derived)


def _keys(secret: str) -> list[bytes]:
    keys = []
    for word in secret.split():
        try:
            key = base64.b64decode(word.removeprefix(_PREFIX), validate=True)
        except binascii.Error:
            key = b""
        if not word.startswith(_PREFIX) or len(key) < _LEAST_KEY_BYTES:
            raise ConfigurationError(
                f"a webhook secret is {_PREFIX} and the base64 of at least {_LEAST_KEY_BYTES} "
                "random bytes: "
                "`tokenmill webhooks secret --new` makes one"
            )
        keys.append(key)
    if not keys:
        raise ConfigurationError("there is no webhook secret: TOKENMILL_WEBHOOK_SECRET")
    return keys


def new_secret() -> str:
    import secrets

    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
