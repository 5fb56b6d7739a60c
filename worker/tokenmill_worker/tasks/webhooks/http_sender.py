"""Sends one HTTP POST to a permitted address, within a time limit.

It follows no redirect, uses no proxy and keeps no cookie. Of the answer it reads only the status
and Retry-After. The time limit covers the whole exchange, so a receiver that sends a byte a second
is cut off like one that is silent.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final, Self, TypeVar
from urllib.parse import quote, unquote, urlsplit

from tokenmill_schemas.webhook import redacted_url
from tokenmill_worker.tasks.webhooks.addresses import Network, resolve

Sock = TypeVar("Sock", bound=socket.socket)

_SAFE: Final = "/%:@!$&'()*+,;=~-._?[]"


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    retry_after_s: float | None = None

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_final(self) -> bool:
        """410 Gone: the receiver wants no further tries."""
        return self.status == 410


class SendFailed(Exception):
    """No answer came; the message is one sentence."""


class Sender:
    """Sends messages. Safe to share between threads. `tls` replaces the system's certificates
    (tests have their own).
    """

    def __init__(
        self,
        timeout_s: float = 10.0,
        allowed: Sequence[Network] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._allowed = tuple(allowed)
        self._tls = tls or ssl.create_default_context()

    def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Send a POST and return the reply. Raises SendFailed, AddressRefused, AddressUnknown."""
        try:
            target = HttpTarget.of(url)
            addresses = resolve(target.host, target.port, self._allowed)
            with _Deadline(self._timeout_s) as deadline:
                try:
                    reply = self._post(target, addresses, deadline, body, headers)
                except (OSError, http.client.HTTPException):
                    if not deadline.has_passed:
                        raise
                if deadline.has_passed:  # the answer may be incomplete
                    raise SendFailed(f"{target.host} did not answer within {self._timeout_s:g} s")
                return reply
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SendFailed(f"{redacted_url(url)}: {error or type(error).__name__}") from error

    def _post(
        self,
        target: HttpTarget,
        addresses: Sequence[str],
        deadline: _Deadline,
        body: bytes,
        headers: Mapping[str, str],
    ) -> Reply:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=self._timeout_s)
        connection.auto_open = 0  # only the socket connected below is used
        with contextlib.closing(connection):
            connection.sock = self._connect(addresses, target.port, deadline)
            if target.is_tls:  # the certificate must match the host name
                connection.sock = deadline.attach(
                    self._tls.wrap_socket(
                        connection.sock, server_hostname=target.host, do_handshake_on_connect=False
                    )
                )
                connection.sock.do_handshake()
            return _exchange(connection, target, body, headers)

    def _connect(self, addresses: Sequence[str], port: int, deadline: _Deadline) -> socket.socket:
        """Connect to the first address that answers."""
        trouble: OSError | None = None
        for address in addresses:
            try:
                sock = socket.create_connection((address, port), self._timeout_s / len(addresses))
            except OSError as error:
                trouble = error
                continue
            sock.settimeout(self._timeout_s)
            return deadline.attach(sock)
        raise trouble or OSError("no address")


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """A URL split into parts, in the form that HTTP needs: ASCII throughout."""

    host: str
    port: int
    is_tls: bool
    path: str
    host_header: str
    authorization: str | None

    @classmethod
    def of(cls, url: str) -> HttpTarget:
        """Split a URL. Raises ValueError if it is no http or https URL."""
        try:
            parts = urlsplit(url)
            is_known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 80)
        except ValueError:  # its message quotes the URL
            is_known = False
        if not is_known or not parts.hostname:
            raise ValueError("is no http or https URL")
        host = parts.hostname if ":" in parts.hostname else parts.hostname.encode("idna").decode()
        path = quote(parts.path or "/", safe=_SAFE) + (
            f"?{quote(parts.query, safe=_SAFE)}" if parts.query else ""
        )
        shown = (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else "")
        login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        basic = f"Basic {base64.b64encode(login.encode()).decode()}" if parts.username else None
        is_tls = parts.scheme == "https"
        return cls(host, parts.port or (443 if is_tls else 80), is_tls, path, shown, basic)


def _exchange(
    connection: http.client.HTTPConnection,
    target: HttpTarget,
    body: bytes,
    headers: Mapping[str, str],
) -> Reply:
    connection.putrequest("POST", target.path, skip_host=True, skip_accept_encoding=True)
    own = {"Host": target.host_header, "Content-Length": str(len(body)), "Connection": "close"}
    if target.authorization is not None:
        own["Authorization"] = target.authorization
    for name, value in {**own, **headers}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    with contextlib.closing(response):
        return Reply(response.status, _seconds(response.getheader("Retry-After")))


def _seconds(value: str | None) -> float | None:
    """Parse Retry-After, which is a number of seconds or a date. Returns None if it is absent or
    invalid.
    """
    if value is None:
        return None
    if value.isascii() and value.isdigit():
        return float(value) if len(value) < 9 else None
    try:
        moment = parsedate_to_datetime(value)
        return max(
            0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - time.time()
        )
    except (ValueError, OverflowError):
        return None


class _Deadline:
    """Shuts down the attached socket when the time is up. A socket's own timeout applies to each
    read, not to the exchange.
    """

    def __init__(self, seconds: float) -> None:
        self.has_passed = False
        self._sock: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def attach(self, sock: Sock) -> Sock:
        self._sock = sock
        if self.has_passed:
            self._shut()
        return sock

    def _cut(self) -> None:
        self.has_passed = True
        self._shut()

    def _shut(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                # below TLS, which another thread is using
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
