"""docker-compose.yml without an engine: what it refers to exists, and what it promises is there.

The file is also checked against the compose specification's schema by hand when it changes; here
are the mistakes that a schema does not see.
"""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tokenmill_worker.app import RECORD_DRAIN_S
from tokenmill_worker.settings import Settings, load_settings
from tokenmill_worker.settings.fields import variable_of

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "ops/deploy/Dockerfile").read_text()
SERVICES = list(yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"])


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


def test_each_dependency_of_a_service_exists_and_has_a_health_check(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, f"{name} depends on {needed}"
            if how["condition"] == "service_healthy":
                assert "test" in services[needed]["healthcheck"], f"{needed} has no health check"
            missing = set(services[needed].get("profiles", [])) - set(service.get("profiles", []))
            assert not missing, f"{name} starts without the profile that {needed} is in"


def test_volumes_are_declared_and_bind_mounts_exist(compose: dict[str, Any]) -> None:
    used = set()
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source, _target, *_options = re.split(r":(?!-)", volume)
            if source.startswith("."):
                assert (ROOT / source).exists(), source
            else:
                used.add(_plain(source))
    assert used == set(compose["volumes"])


def test_worker_services_have_the_profiles_cpu_and_gpu(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["worker-cpu"]["profiles"] == ["cpu"]
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert "deploy" not in services["worker-cpu"]


def test_a_gpu_s_worker_has_the_settings_of_a_cpu_s(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu, on_gpu = (
        _settings(compose["services"][name], monkeypatch) for name in ("worker-cpu", "worker-gpu")
    )
    assert on_gpu == on_cpu  # the limits of a step follow the device


def _plain(value: object) -> str:
    """Replace the variables: ${NAME:-default} by its default, ${NAME:?…} by NAME."""
    return re.sub(r"\$\{(\w+):\?[^}]*\}", r"\1", re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value)))


def _settings(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in [name for name in os.environ if name.startswith("TOKENMILL_")]:  # noqa: TID251 - the worker's own source
        monkeypatch.delenv(name)
    for name, value in service["environment"].items():
        if value is not None:  # None: the variable of .env or of the shell, if there is one
            monkeypatch.setenv(name, _plain(value))
    return load_settings()  # strict: an unknown variable is an error


# The file sets these itself: who talks to whom, and what its own waiting times and volumes fit.
_OWN = {
    *("redis_url", "database_url", "tasks_broker_url", "webhook_secret", "worker_id"),
    *("drain_seconds", "metrics_host", "metrics_port", "cache_dir"),
}


@pytest.mark.parametrize("service", ["worker-cpu", "worker-gpu", "migrate", "tasks", "exporter"])
def test_every_setting_in_dot_env_is_passed_to_every_role(
    compose: dict[str, Any], service: str
) -> None:
    """A variable without a value is passed on where .env or the shell has it."""
    environment = compose["services"][service]["environment"]
    passed = {name for name, value in environment.items() if value is None}
    ours = {variable_of(name) for name in Settings.model_fields if name not in _OWN}
    own = {variable_of(name) for name in _OWN}
    if service == "tasks":  # which has the volume of files
        own |= {"TOKENMILL_FILES"}
        passed -= {name for name in passed if name.startswith("AWS_")}
        own |= {name for name in environment if name.startswith("AWS_")}
    assert passed == ours - own | {"OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"}
    assert {name for name in environment if name not in passed} <= own


def test_the_webhook_secret_is_passed_to_the_tasks_only(compose: dict[str, Any]) -> None:
    services = compose["services"]
    knowing = [
        name
        for name, service in services.items()
        if "TOKENMILL_WEBHOOK_SECRET" in service.get("environment", {})
    ]
    assert knowing == ["tasks"]


@pytest.mark.parametrize("service", SERVICES)
def test_every_container_has_dropped_rights_and_limits(
    compose: dict[str, Any], service: str
) -> None:
    content = compose["services"][service]
    assert content["cap_drop"] == ["ALL"]
    assert content["security_opt"] == ["no-new-privileges:true"]
    assert content["init"] is True
    assert re.fullmatch(r"\d+[mg]", _plain(content["mem_limit"]))
    assert content["logging"]["driver"] == "json-file"
    assert set(content["logging"]["options"]) == {"max-size", "max-file"}
    if service not in ("prometheus", "grafana"):  # they choose what they write themselves
        assert content["read_only"] is True
        assert content["tmpfs"][0].startswith("/tmp")


def test_the_servers_run_as_their_own_users(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert [services[name]["user"] for name in ("redis", "postgres")] == ["valkey", "postgres"]
    assert "USER tokenmill" in DOCKERFILE


@pytest.mark.parametrize("role", ["worker", "tasks", "exporter", "gateway"])
def test_a_role_has_the_same_memory_limit_as_in_kubernetes(
    compose: dict[str, Any], role: str
) -> None:
    documents = yaml.safe_load_all((ROOT / f"ops/deploy/k8s/{role}.yaml").read_text())
    (container,) = next(iter(documents))["spec"]["template"]["spec"]["containers"]
    service = "worker-cpu" if role == "worker" else role
    limit = _plain(compose["services"][service]["mem_limit"])
    assert limit.upper() + "i" == container["resources"]["limits"]["memory"]
    if role == "worker":  # and the time that Kubernetes gives it to come up
        probe = container["startupProbe"]
        minutes = int(compose["services"][service]["healthcheck"]["start_period"][:-1])
        assert minutes * 60 == probe["periodSeconds"] * probe["failureThreshold"]


def test_valkey_s_maxmemory_is_half_of_its_container_s(compose: dict[str, Any]) -> None:
    server = compose["services"]["redis"]
    limit = server["mem_limit"]
    assert limit == server["environment"]["MEMORY_MB"] + "m"
    assert '--maxmemory "$$((MEMORY_MB / 2))mb"' in server["command"][-1]


def test_postgresql_is_healthy_only_after_its_port_is_open(
    compose: dict[str, Any],
) -> None:
    """The first start answers on its socket while it still makes the database."""
    (_, command) = compose["services"]["postgres"]["healthcheck"]["test"]
    assert "-h 127.0.0.1" in command


@pytest.mark.parametrize("service", ["worker-cpu", "worker-gpu"])
def test_the_models_folder_is_mounted_read_only(compose: dict[str, Any], service: str) -> None:
    assert "${MODELS_FOLDER:-no-models}:/models:ro" in compose["services"][service]["volumes"]


@pytest.mark.parametrize("service", ["worker-cpu", "worker-gpu", "migrate", "tasks", "exporter"])
def test_the_build_gets_the_package_index_and_the_version(
    compose: dict[str, Any], service: str
) -> None:
    content = compose["services"][service]
    given = content["build"]["args"]
    assert set(given) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX_URL", "VERSION"} == set(given)
    assert given["VERSION"] == "${TOKENMILL_VERSION:-local}"
    assert given["VERSION"] in content["image"]
    is_for_gpus = service == "worker-gpu"
    assert (given["TORCH_INDEX_URL"] == "") is is_for_gpus  # CPU builds are for the others
    assert content["image"].endswith("-gpu") is is_for_gpus


def test_the_image_is_not_based_on_a_cuda_image() -> None:
    """Every stage of a file is built without BuildKit, wanted or not."""
    assert "nvidia" not in DOCKERFILE
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert set(bases) == {"$PYTHON_IMAGE", "dependencies"}
    flash = (ROOT / "ops/deploy/flash-attn.Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", flash, re.MULTILINE) == ["$IMAGE"]
    assert "--only-binary :all:" in flash


def test_a_change_of_the_code_reuses_the_layer_of_packages() -> None:
    """Docker repeats what follows the first line that changed."""
    steps = [
        DOCKERFILE.index(step)
        for step in (
            "torch setuptools\n",
            "COPY pyproject.toml",
            "-r requirements.txt",
            "COPY worker",
        )
    ]
    assert steps == sorted(steps)
    last = DOCKERFILE.rindex("\nFROM ")
    assert DOCKERFILE.index("COPY --from=dependencies", last) < DOCKERFILE.index(
        "COPY --from=code", last
    )
    assert DOCKERFILE.index("ARG VERSION", last) > DOCKERFILE.index("pip install", last)
    assert 'TOKENMILL_REVISION="$VERSION" pip wheel' in DOCKERFILE  # see tokenmill_schemas.release


def test_compiled_kernels_are_stored_in_the_volume(compose: dict[str, Any]) -> None:
    """The root file system is read-only, and a container's own files go with it."""
    (cache, _) = compose["services"]["worker-gpu"]["volumes"]
    folder = cache.split(":")[1]
    assert f"TRITON_CACHE_DIR={folder}/" in DOCKERFILE


def test_the_worker_s_variables_are_valid_settings(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = compose["services"]["worker-cpu"]
    settings = _settings(worker, monkeypatch)
    assert settings.queue_name == "smollm2-135m-instruct"
    assert (
        settings.database_url
        == "postgresql+psycopg://tokenmill:POSTGRES_PASSWORD@postgres:5432/tokenmill"
    )
    grace = float(worker["stop_grace_period"].removesuffix("s"))
    assert grace > settings.drain_seconds + RECORD_DRAIN_S
    assert f":{settings.metrics_port}/healthz" in worker["healthcheck"]["test"][-1]


@pytest.mark.parametrize(
    ("service", "role"), [("worker-cpu", "worker"), ("exporter", "reader"), ("tasks", "tasks")]
)
def test_every_role_connects_as_its_own_user(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch, service: str, role: str
) -> None:
    url = urlsplit(_settings(compose["services"][service], monkeypatch).redis_url)
    assert (url.username, url.password, url.hostname) == (
        role,
        f"REDIS_{role.upper()}_PASSWORD",
        "redis",
    )
    users = (ROOT / "ops/deploy/redis/users.acl").read_text()
    assert f"user {role} on >change-me-{role} " in users
    server = compose["services"]["redis"]
    variable = re.search(rf"s\|change-me-{role}\|\$\$(\w+)\|", server["command"][-1])
    assert variable is not None
    assert _plain(server["environment"][variable[1]]) == f"REDIS_{role.upper()}_PASSWORD"


def test_every_role_s_checked_in_password_is_replaced(compose: dict[str, Any]) -> None:
    users = re.findall(
        r"^user (\w+) on ", (ROOT / "ops/deploy/redis/users.acl").read_text(), re.MULTILINE
    )
    command = compose["services"]["redis"]["command"][-1]
    replaced = {name for name in users if f"change-me-{name}|$$" in command}
    left_out = {name for name in users if f'-e "/^user {name} /d"' in command}
    assert replaced | left_out == set(users)
    assert left_out == {"replica", "sentinel"}


def test_every_target_that_prometheus_scrapes_is_a_service(compose: dict[str, Any]) -> None:
    services = compose["services"]
    prometheus = yaml.safe_load((ROOT / "ops/deploy/prometheus/prometheus.yml").read_text())
    scrape = prometheus["scrape_configs"]
    named = {
        (name, found["port"])
        for job in scrape
        for found in job.get("dns_sd_configs", ())
        for name in found["names"]
    }
    fixed = {
        tuple(job["static_configs"][0]["targets"][0].split(":"))
        for job in scrape
        if "static_configs" in job
    }
    for name, port in named | fixed:
        environment = services[name]["environment"]
        metrics = "TOKENMILL_GATEWAY_METRICS" if name == "gateway" else "TOKENMILL_METRICS"
        assert environment[f"{metrics}_PORT"] == int(port)
        assert environment[f"{metrics}_HOST"] == "0.0.0.0"
    for name, port in fixed:
        assert f":{port}/healthz" in services[name]["healthcheck"]["test"][-1]
    assert {name for name, _ in named} == {"worker-cpu", "worker-gpu", "gateway"}
    assert {name for name, _ in fixed} == {"tasks", "exporter"}
    source = yaml.safe_load(
        (ROOT / "ops/deploy/grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    provider = yaml.safe_load(
        (ROOT / "ops/deploy/grafana/provisioning/dashboards/tokenmill.yml").read_text()
    )["providers"][0]
    assert (
        f"./ops/deploy/grafana/dashboards:{provider['options']['path']}:ro"
        in services["grafana"]["volumes"]
    )


def test_migration_runs_once_before_the_workers(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["migrate"]["command"] == ["db", "upgrade"]
    assert services["migrate"]["restart"] == "no"
    assert (
        services["worker-cpu"]["depends_on"]["migrate"]["condition"]
        == "service_completed_successfully"
    )


def test_only_loopback_ports_are_published(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_servers_store_their_data_in_volumes(compose: dict[str, Any]) -> None:
    assert "redis-data:/data" in compose["services"]["redis"]["volumes"]
    assert re.match(r"postgres:17\b", compose["services"]["postgres"]["image"])
    (config,) = [v for v in compose["services"]["redis"]["volumes"] if v.startswith(".")]
    assert (ROOT / config.split(":")[0] / "redis.conf").is_file()
