"""docker-compose.yml without an engine: what it refers to exists, and what it promises is there.

The file is also checked against the compose specification's schema by hand when it changes; here are the
mistakes that a schema does not see.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from worker.settings import load_settings

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


def test_dependencies_exist_and_can_be_waited_for(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, f"{name} depends on {needed}"
            if how["condition"] == "service_healthy":
                assert "test" in services[needed]["healthcheck"], f"{needed} has no health check"
            assert "profiles" not in services[needed], f"{name} starts without the profile that {needed} is in"


def test_volumes_are_declared_and_bind_mounts_exist(compose: dict[str, Any]) -> None:
    used = set()
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), source
            else:
                used.add(source)
    assert used == set(compose["volumes"])


def test_worker_profiles(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["worker-cpu"]["profiles"] == ["cpu"]
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert "deploy" not in services["worker-cpu"]


def test_the_worker_s_variables_are_settings_it_knows(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = compose["services"]["worker-cpu"]
    for name in [name for name in os.environ if name.startswith("TOKENMILL_")]:  # noqa: TID251 - the worker's own source
        monkeypatch.delenv(name)
    for name, value in worker["environment"].items():
        default = re.fullmatch(r"\$\{\w+:-(.*)\}", str(value))
        text = default[1] if default else re.sub(r"\$\{\w+:-(\w+)\}", r"\1", str(value))
        monkeypatch.setenv(name, text)
    settings = load_settings()  # strict: an unknown variable is an error
    assert settings.queue_name == "smollm2-135m-instruct"
    assert settings.redis_url == "redis://redis:6379/0"
    assert settings.database_url == "postgresql+psycopg://tokenmill:tokenmill@postgres:5432/tokenmill"
    grace = float(worker["stop_grace_period"].removesuffix("s"))
    assert grace > settings.drain_seconds + settings.record_drain_seconds
    assert f":{settings.metrics_port}/healthz" in worker["healthcheck"]["test"][-1]


def test_migration_runs_once_before_the_workers(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["migrate"]["command"] == ["db", "upgrade"]
    assert services["migrate"]["restart"] == "no"
    assert services["worker-cpu"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"


def test_only_loopback_ports_are_published(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_servers_keep_their_data(compose: dict[str, Any]) -> None:
    assert "redis-data:/data" in compose["services"]["redis"]["volumes"]
    assert re.match(r"postgres:17\b", compose["services"]["postgres"]["image"])
    (config,) = [v for v in compose["services"]["redis"]["volumes"] if v.startswith(".")]
    assert (ROOT / config.split(":")[0] / "redis.conf").is_file()
