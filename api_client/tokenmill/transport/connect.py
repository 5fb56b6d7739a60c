"""Opens the connections of producers and workers from a URL: standalone, Sentinel or Cluster. No
other module does.

redis-py reads `redis://`, `rediss://` and `unix://`.
`redis+sentinel://host:26379,host:26379/<service>/<db>` and `redis+cluster://host:6379,host:6379`
are added here, with `rediss+…` for TLS. The query has redis-py's options, in every form; Celery's
spelling of `ssl_cert_reqs` (CERT_NONE, CERT_OPTIONAL, CERT_REQUIRED) means the same. Timeouts are
always set. A command is retried only if the caller asks for it, because only the caller knows
whether a write may be repeated.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import SplitResult, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.cluster
import redis.retry
import redis.sentinel
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisClusterException, RedisError

from tokenmill.errors import ConfigurationError, QueueUnavailable
from tokenmill.transport.repairs import reconnect_on_readonly, with_time_limits

# Every error of redis-py about a server; a cluster's own errors do not derive from RedisError.
SERVER_TROUBLE = (RedisError, RedisClusterException, OSError)

# No CLIENT SETINFO: servers before Redis 7.2 do not know it, and redis-py would read its own
# package metadata for each connection. Older versions of redis-py send it and ignore the refusal.
_NO_DRIVER_INFO: dict[str, Any] = (
    {"driver_info": None} if importlib.util.find_spec("redis.driver_info") else {}
)

_NO_MASTER = (redis.sentinel.MasterNotFoundError, redis.asyncio.sentinel.MasterNotFoundError)
_PLACE_IN_SCRIPT = re.compile(r"\.? script: (?:[0-9a-f]{40}, )?on @user_script:\d+\.?")


def server_words(error: Exception) -> str:
    """Return what a server's error says, without the objects of redis-py and the place in a script.

    If no sentinel knows a master, redis-py's message lists all sentinels in full.
    """
    if isinstance(error, _NO_MASTER):
        return str(error).partition(" : ")[0]
    return _PLACE_IN_SCRIPT.sub("", str(error)) or type(error).__name__


_NO_PORT = (
    "the Redis URL does not name host:port where it should; "
    "is a character of its password not quoted (%2F for /)?"
)
_ONE_DATABASE = "a Redis Cluster has only database 0"
_MAX_CONNECTIONS = 4096  # redis-py's default of 100 rejects the 101st thread that streams
_DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}
_CELERY_CERT_REQS = re.compile(r"(?<=[?&]ssl_cert_reqs=)CERT_(NONE|OPTIONAL|REQUIRED)(?=&|$)", re.I)

# Calls without type annotations in redis-py.
_to_bool: Any = redis.connection.to_bool
_CLUSTER_OPTIONS: dict[str, Any] = {  # redis-py reads the others
    "cluster_error_retry_attempts": int,
    "dynamic_startup_nodes": _to_bool,
    "read_from_replicas": _to_bool,
    "reinitialize_steps": int,
    "require_full_coverage": _to_bool,
}
_sync_sentinel: Any = redis.sentinel.Sentinel
_async_sentinel: Any = redis.asyncio.sentinel.Sentinel
_sync_node: Any = redis.cluster.ClusterNode
_parse_options: Any = redis.connection.parse_url


@dataclass(frozen=True, slots=True)
class Link:
    """Options of the connections. `timeout_s` limits the wait for each reply. Set `retries` only if
    every call may be repeated.
    """

    timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    retries: int = 0
    client_name: str | None = None
    max_connections: int | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed URL. `kind` is "single", "sentinel" or "cluster"."""

    kind: str
    url: str  # what redis-py reads, for "single"
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cluster(self) -> bool:
        return self.kind == "cluster"


def parse_url(url: str) -> Endpoint:
    """Parse a URL. Raises ConfigurationError with one sentence.

    The sentence repeats nothing of the URL after its scheme, because an unquoted password may stand
    anywhere in it.
    """
    url = _CELERY_CERT_REQS.sub(lambda found: found[1].lower(), url.strip())
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigurationError(
            "the Redis URL cannot be read: is a character of its password not quoted (%40 for @)?"
        ) from None
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss", "unix") or (kind and kind not in _DEFAULT_PORTS):
        raise ConfigurationError(
            "a Redis URL starts with redis://, rediss://, unix://, redis+sentinel:// or "
            f"redis+cluster://, not {parts.scheme!r}"
        )
    if not kind:
        _check_port(parts)
        if scheme != "unix" and not re.fullmatch(r"(/[0-9]*)?/?", parts.path):
            raise ConfigurationError(
                "the path of a Redis URL is a database number: redis://host:6379/0"
            )
        # Only the scheme changes: rebuilding would lose a slash of unix://.
        return Endpoint("single", scheme + url[len(scheme) :])
    options = _query_options(parts.query, kind, has_tls=scheme == "rediss")
    credentials, _, addresses = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    if username:
        options["username"] = unquote(username)
    if password:
        options["password"] = unquote(password)
    hosts = tuple(
        _address(text, _DEFAULT_PORTS[kind]) for text in addresses.split(",") if text.strip()
    )
    if not hosts:
        raise ConfigurationError("the Redis URL names no host")
    service, database = _path(parts, kind)
    if database:
        options["db"] = database
    if kind == "cluster" and options.pop("db", 0):
        raise ConfigurationError(_ONE_DATABASE)
    return Endpoint(kind, "", hosts, service, options)


def _query_options(query: str, kind: str, *, has_tls: bool) -> dict[str, Any]:
    """Return the options of a query as values. Raises ConfigurationError."""
    with _options_of_urls():
        options: dict[str, Any] = _parse_options(f"redis://?{query}")
        of_cluster = _CLUSTER_OPTIONS if kind == "cluster" else {}
        taken = {name: read(options[name]) for name, read in of_cluster.items() if name in options}
        rest = {k: v for k, v in options.items() if k not in taken and k != "max_connections"}
        _ = (redis.SSLConnection if has_tls else redis.Connection)(**rest)  # opens no connection
    return options | taken | ({"ssl": True} if has_tls else {})


def _address(text: str, default_port: int) -> tuple[str, int]:
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:  # an IPv6 address without a port
        return text.strip("[]"), default_port
    if not (port.isascii() and port.isdigit()):
        raise ConfigurationError(_NO_PORT)
    return host.strip("[]"), int(port)


def _check_port(parts: SplitResult) -> None:
    try:
        _ = parts.port
    except ValueError:
        raise ConfigurationError(_NO_PORT) from None


def _path(parts: SplitResult, kind: str) -> tuple[str, int]:
    names = [unquote(name) for name in parts.path.split("/") if name]
    if kind == "cluster":
        if names and names != ["0"]:
            raise ConfigurationError(_ONE_DATABASE)
        return "", 0
    if not names:
        raise ConfigurationError(
            "a Sentinel URL names its service: redis+sentinel://host:26379/<service>/<db>"
        )
    if len(names) > 2 or not all(name.isascii() and name.isdigit() for name in names[1:]):
        raise ConfigurationError(
            "the last part of a Sentinel URL is a database number: /<service>/<db>"
        )
    return names[0], int(names[1]) if len(names) > 1 else 0


def _options(link: Link) -> dict[str, Any]:
    # RESP2 has the same replies on every server.
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": link.timeout_s,
        "socket_connect_timeout": link.connect_timeout_s,
        "health_check_interval": 0,
    }
    options |= _NO_DRIVER_INFO
    if link.client_name:
        options["client_name"] = link.client_name
    options["max_connections"] = link.max_connections or _MAX_CONNECTIONS
    return options


def _backoff() -> ExponentialWithJitterBackoff:
    return ExponentialWithJitterBackoff(cap=1.0, base=0.02)


@contextmanager
def _options_of_urls() -> Iterator[None]:
    """Raise ConfigurationError for an option of the URL that redis-py rejects. The message names
    the option; only the cause repeats its value.
    """
    try:
        yield
    except TypeError:  # the option's name may be part of a password: do not repeat it
        raise ConfigurationError(
            "the Redis URL has an option that Redis clients do not know"
        ) from None
    except (ValueError, OSError, RedisError) as error:  # OSError: a certificate that is not there
        raise ConfigurationError(f"the Redis URL has an option that cannot be: {error}") from None


def _with_known_options(client: Any) -> Any:
    """Return the client after checking its options, which redis-py would do at the first command.
    Raises TypeError.
    """
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)  # opens no connection
    return client


def connect(url: str, link: Link | None = None) -> redis.Redis:
    """Create a client for threads.

    Nothing is sent before the first command, except that a cluster is asked for its nodes; this
    raises QueueUnavailable if none answers.
    """
    link, endpoint = link or Link(), parse_url(url)
    options = _options(link) | {"retry": redis.retry.Retry(_backoff(), link.retries)}
    if endpoint.kind == "single":
        with _options_of_urls():
            client = cast(
                "redis.Redis", _with_known_options(redis.Redis.from_url(endpoint.url, **options))
            )
        reconnect_on_readonly(client)
        return client
    options |= endpoint.options
    if endpoint.kind == "sentinel":
        asked = _sentinel_options(options) | {"retry": redis.retry.Retry(_backoff(), 0)}
        sentinel = _sync_sentinel(list(endpoint.hosts), sentinel_kwargs=asked, **options)
        with _options_of_urls():
            client = _with_known_options(
                sentinel.master_for(endpoint.service, redis_class=_ThroughSentinel)
            )
        return cast("redis.Redis", client)
    nodes = [_sync_node(host, port) for host, port in endpoint.hosts]
    try:
        return cast("redis.Redis", redis.cluster.RedisCluster(startup_nodes=nodes, **options))
    except SERVER_TROUBLE as error:
        raise QueueUnavailable(f"the queue's cluster: {error}") from error


def connect_async(url: str, link: Link | None = None) -> redis.asyncio.Redis:
    """Create a client for one event loop. Nothing is sent before the first command."""
    link, endpoint = link or Link(), parse_url(url)
    options = _options(link) | {"retry": redis.asyncio.retry.Retry(_backoff(), link.retries)}
    if endpoint.kind == "single":
        with _options_of_urls():
            made = redis.asyncio.Redis.from_url(endpoint.url, **options)
            aclient = cast("redis.asyncio.Redis", _with_known_options(made))
        _set_time_limits(aclient)
        reconnect_on_readonly(aclient)
        return aclient
    options |= endpoint.options
    if endpoint.kind == "sentinel":
        asked = _sentinel_options(options) | {"retry": redis.asyncio.retry.Retry(_backoff(), 0)}
        sentinel = _async_sentinel(list(endpoint.hosts), sentinel_kwargs=asked, **options)
        with _options_of_urls():
            client = _with_known_options(
                sentinel.master_for(endpoint.service, redis_class=_AsyncThroughSentinel)
            )
        _set_time_limits(client)
        return cast("redis.asyncio.Redis", client)
    nodes = [redis.asyncio.cluster.ClusterNode(host, port) for host, port in endpoint.hosts]
    with _options_of_urls():
        cluster = redis.asyncio.cluster.RedisCluster(startup_nodes=nodes, **options)
    made_with = cluster.connection_kwargs  # what the nodes make their connections with
    made_with["connection_class"] = with_time_limits(made_with["connection_class"])
    return cast("redis.asyncio.Redis", cluster)


def _set_time_limits(client: Any) -> None:
    pool = client.connection_pool
    pool.connection_class = with_time_limits(pool.connection_class)


class _ThroughSentinel(redis.Redis):
    """A client that also closes its connections to the sentinels, which redis-py leaves open."""

    def close(self) -> None:
        super().close()
        for sentinel in cast("Any", self.connection_pool).sentinel_manager.sentinels:
            sentinel.close()


class _AsyncThroughSentinel(redis.asyncio.Redis):
    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for sentinel in cast("Any", self.connection_pool).sentinel_manager.sentinels:
            await sentinel.aclose()


def _sentinel_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of connections to sentinels. Sentinels have their own users; timeouts and
    TLS are shared.

    The caller adds a retry policy without retries: redis-py would ask an unreachable sentinel ten
    times before it tries the next one.
    """
    return {
        key: value
        for key, value in options.items()
        if key.startswith(("socket_", "ssl")) or key == "protocol"
    }
