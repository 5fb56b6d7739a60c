"""Fixtures that every part shares: real servers of this test run's own, clean for each test, gone
at the end.

A missing server skips its tests at home and fails them where CI=true. After each test that passed,
the keys it left on the server are checked against the list of those that may stay.
"""

import contextlib
import gc
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.exits import last_words, leave_last_words
from tests.support.leaks import leaked_keys
from tests.support.lifecycle import missing, need_valkey
from tests.support.marks import LONG
from tests.support.pgbouncer import PgBouncer, pgbouncer_binary
from tests.support.postgres import PostgresServer, PostgresUnavailable
from tests.support.proxy import FaultProxy
from tests.support.topologies import SentinelGroup, ValkeyCluster
from tests.support.valkey import ControlledValkey

# Nothing above imports torch, which reads these once. Test runs share small machines, where
# spinning threads cost more than they give. No test may reach for the network.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # noqa: TID251 - libraries read them, we do not
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # noqa: TID251
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # noqa: TID251

# What is slow here may be quick elsewhere: no example fails for the time that it, or its making,
# took.
settings.register_profile(
    "any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

_PASSED = pytest.StashKey[bool]()
_LENGTHY = ("slow", "chaos", "soak")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounds", type=int, default=3, help="how many rounds of faults the chaos tests run"
    )
    parser.addoption(
        "--soak-seconds", type=float, default=60.0, help="how long each soak test runs"
    )
    parser.addoption(
        "--soak-jobs",
        type=int,
        default=0,
        help="how many jobs the soak of the service submits instead, and the run of two engines",
    )
    parser.addoption(
        "--engine", default="", help="package of an engine that tests/engines/conformance tries"
    )
    parser.addoption(
        "--engine-command",
        default="",
        help="command line of its process, without the number of the socket",
    )
    parser.addoption("--engine-settings", default="{}", help="settings in its first frame, as JSON")


def _length(item: pytest.Item) -> tuple[float, bool]:
    """Return the sort key of a test: its time limit (s), and if a mark says that it takes long."""
    limit = item.get_closest_marker("timeout")
    return (float(limit.args[0]) if limit else 0.0, any(map(item.get_closest_marker, _LENGTHY)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from the loaded modules and tests, while they are loaded and
    later: they stay, and each full collection would walk a million objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # the order is random until here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--rounds") < LONG and not any("::" in name for name in config.args):
        repeats = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=repeats)
    # a run in several processes would else wait for a long one that began last
    items.sort(key=_length, reverse=True)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():  # also under CI=true: few machines have one
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        leave_last_words(last_words(worker))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Print how a test process died, since xdist does not say it.

    The process's last output was captured, so its stacks come from the file of `last_words`.
    """
    if error is not None:
        # then it lives on, and only its pipe broke
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = node.gateway._io.popen.wait(timeout=5)
            node.config.get_terminal_writer().line(
                f"\n[{node.gateway.id}] ended with status {status}", red=True
            )
        words = last_words(node.workerinput)
        if words.exists():
            node.config.get_terminal_writer().line(words.read_text())
            words.unlink()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """The number of rounds of faults that a chaos test runs; `--rounds 200` is the long form."""
    return int(request.config.getoption("--rounds"))


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--soak-seconds"))


@pytest.fixture
def soak_jobs(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--soak-jobs"))


@pytest.fixture(scope="session")
def valkey() -> Iterator[ControlledValkey]:
    """One server for the whole run, for tests that neither stop nor reconfigure it; see
    `redis_url`.
    """
    need_valkey()
    with ControlledValkey(persistent=False) as server:
        yield server


@pytest.fixture
def allowed_keys() -> list[str]:
    """Shell patterns of keys that this test may leave; append to it."""
    return []


@pytest.fixture
def redis_url(
    valkey: ControlledValkey, allowed_keys: list[str], request: pytest.FixtureRequest
) -> Iterator[str]:
    """Yield an empty database on the shared server. Keys left must have a TTL or be allowed."""
    with valkey.client() as client:
        client.flushall()
        yield valkey.url
        if request.node.stash.get(_PASSED, False):
            leaks = leaked_keys(client, allowed_keys)
            assert not leaks, "keys that would stay for ever:\n" + "\n".join(leaks)


@pytest.fixture
def make_valkey() -> Iterator[Callable[..., ControlledValkey]]:
    """Start servers of a test's own, to be stopped, killed and restarted:
    `make_valkey(settings={...})`.
    """
    need_valkey()
    servers: list[ControlledValkey] = []

    def make(**options: object) -> ControlledValkey:
        servers.append(ControlledValkey(**options))  # type: ignore[arg-type]
        return servers[-1].start()

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def make_proxy() -> Iterator[Callable[[int], FaultProxy]]:
    """A fault proxy in front of a loopback port: `make_proxy(server.port)`, then connect to its
    `.url` or `.port`.
    """
    proxies: list[FaultProxy] = []

    def make(port: int) -> FaultProxy:
        proxies.append(FaultProxy(port).start())
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.stop()


@pytest.fixture(scope="module")
def valkey_cluster() -> Iterator[ValkeyCluster]:
    """Yield three primaries without replicas; its `.url` is for our own clients.

    No test run empties them: use queue names of your own.
    """
    need_valkey()
    with ValkeyCluster() as cluster:
        yield cluster


@pytest.fixture
def sentinel_group() -> Iterator[SentinelGroup]:
    """A primary, a replica and three sentinels; `.fail_over()` kills the primary."""
    need_valkey()
    with SentinelGroup() as group:
        yield group


def _running_postgres() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer().start()
    except PostgresUnavailable as error:
        missing(str(error))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One cluster for the whole run, for tests that do not stop it; see `postgres_url` and
    `own_postgres`.
    """
    yield from _running_postgres()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """A fresh, empty database, as a SQLAlchemy URL."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def migrated_postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """A database with this version's schema, as a SQLAlchemy URL."""
    url = postgres.create_migrated()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def pooled_url(postgres: PostgresServer, postgres_url: str) -> Iterator[str]:
    """The database of `postgres_url` behind PgBouncer in transaction mode."""
    if (binary := pgbouncer_binary()) is None:
        missing("no pgbouncer on this machine")
    pooler = PgBouncer(postgres, binary).start()
    yield pooler.url(postgres_url)
    pooler.stop()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A cluster that this test may stop, kill and restart."""
    yield from _running_postgres()
