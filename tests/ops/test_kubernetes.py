"""Holds ops/deploy/k8s against Kubernetes' own schemas, and against the settings, ports, paths and
signals of the code.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

from tests.ops.test_compose_gateway import gateway_variables
from tokenmill_gateway.app import ALL_CALLS
from tokenmill_worker.app import RECORD_DRAIN_S
from tokenmill_worker.settings import Settings, load_settings
from tokenmill_worker.telemetry import HealthServer

FOLDER = Path(__file__).parents[2] / "ops" / "deploy" / "k8s"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
DOCUMENTS: dict[str, dict[str, Any]] = {
    f"{document['kind']}/{document['metadata']['name']}": document
    for name in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((FOLDER / name).read_text())
}
with tempfile.TemporaryDirectory() as _folder:  # as kustomize makes the Secret
    subprocess.run(
        [FOLDER.parents[1] / "secrets", "kubernetes", _folder], check=True, capture_output=True
    )
    _lines = (Path(_folder) / "secret.env").read_text().splitlines()
(_SECRET,) = KUSTOMIZATION["secretGenerator"]
SECRETS = dict(line.split("=", 1) for line in _lines)
SCALER_SCHEMA = json.loads((FOLDER / "schemas" / "scaledobject.json").read_text())
PODS = {
    name: d["spec"]["template"]["spec"]
    for name, d in DOCUMENTS.items()
    if d["kind"] in ("Deployment", "Job")
}
WORKER, GATEWAY = "Deployment/tokenmill-worker", "Deployment/tokenmill-gateway"
VERSIONS = ("1.30", "1.34", "1.37")


def variables(pod: dict[str, Any]) -> dict[str, str]:
    """Return the environment that the container will have."""
    (container,) = pod["containers"]
    values: dict[str, str] = {}
    for source in container.get("envFrom", []):
        values |= DOCUMENTS[f"ConfigMap/{source['configMapRef']['name']}"]["data"]
    for entry in container["env"]:
        if "value" in entry:
            values[entry["name"]] = entry["value"]
        elif "secretKeyRef" in entry["valueFrom"]:
            reference = entry["valueFrom"]["secretKeyRef"]
            assert reference["name"] == _SECRET["name"]
            values[entry["name"]] = SECRETS[reference["key"]]
        else:
            values[entry["name"]] = "a-pod"
    return values


def settings_of(pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in [name for name in os.environ if name.startswith("TOKENMILL_")]:  # noqa: TID251 - the worker's own source
        monkeypatch.delenv(name)
    for name, value in variables(pod).items():
        monkeypatch.setenv(name, value)
    return load_settings()  # strict: an unknown variable is an error


def test_every_file_of_the_folder_is_in_the_kustomization() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "name", [name for name in DOCUMENTS if not name.startswith("ScaledObject")]
)
def test_every_field_is_in_kubernetes_schema(name: str, version: str) -> None:
    kubernetes_validate.validate(DOCUMENTS[name], version, strict=True)


def test_every_field_of_the_scaler_is_in_kedas_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCALER_SCHEMA)
    scaler = DOCUMENTS["ScaledObject/tokenmill-worker"]
    jsonschema.validate(scaler, SCALER_SCHEMA)
    broken = json.loads(json.dumps(scaler))
    broken["spec"]["triggers"][0]["metadata"]["threshold"] = 48  # KEDA's metadata are strings
    with pytest.raises(jsonschema.ValidationError, match="48"):
        jsonschema.validate(broken, SCALER_SCHEMA)


def keda_reads(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document as KEDA's own classes read it; fields unknown to them are dropped."""
    from cloudcoil.models.keda.v1alpha1 import ScaledObject  # a second's import

    read: dict[str, Any] = ScaledObject.model_validate(document).model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    return read


def test_the_installed_keda_definition_has_every_field_of_the_scaler() -> None:
    scaler = DOCUMENTS["ScaledObject/tokenmill-worker"]
    assert keda_reads(scaler) == scaler


@pytest.mark.parametrize(
    "path",
    [
        ("minReplicas",),
        ("fallback", "replica"),
        ("scaleTargetRef", "deployment"),
        ("triggers", 0, "metric"),
        (
            "advanced",
            "horizontalPodAutoscalerConfig",
            "behavior",
            "scaleUp",
            "policies",
            0,
            "seconds",
        ),
    ],
)
def test_a_field_unknown_to_keda_is_detected(path: tuple[str | int, ...]) -> None:
    broken = json.loads(json.dumps(DOCUMENTS["ScaledObject/tokenmill-worker"]))
    place = broken["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = 1
    assert keda_reads(broken) != broken
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCALER_SCHEMA)


def test_a_misspelt_field_is_detected() -> None:
    broken = json.loads(json.dumps(DOCUMENTS[WORKER]))
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", PODS)
def test_every_variable_is_a_setting_and_every_role_has_its_own_user(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(PODS[name], monkeypatch)
    roles = {"worker": "worker", "tasks": "tasks", "exporter": "reader", "gateway": "gateway"}
    role = roles.get(name.rpartition("-")[2])
    if role is not None:
        assert settings.redis_url.startswith(f"redis://{role}:")


@pytest.mark.parametrize("engine", ["own", "vllm"])
def test_the_worker_s_settings_are_accepted_beside_each_engine_of_models(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_of(PODS[WORKER], monkeypatch)
    monkeypatch.setenv("TOKENMILL_ENGINE", engine)
    assert load_settings().engine_kind == engine


@pytest.mark.parametrize("name", PODS)
def test_pods_run_unprivileged_and_write_only_to_their_volumes(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    allowed = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["securityContext"] == allowed
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert "/tmp" in mounts
    assert container["resources"]["limits"]["memory"]
    dockerfile = (FOLDER.parent / "Dockerfile").read_text()
    assert f"--uid {pod['securityContext']['runAsUser']} tokenmill" in dockerfile


def test_a_pod_s_grace_period_covers_its_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(PODS[WORKER], monkeypatch)
    needed = settings.drain_seconds + RECORD_DRAIN_S
    assert PODS[WORKER]["terminationGracePeriodSeconds"] >= needed + 10


def test_the_worker_s_caches_are_writable() -> None:
    (container,) = PODS[WORKER]["containers"]
    cache = "/home/tokenmill/.cache"
    assert cache in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert variables(PODS[WORKER])["TRITON_CACHE_DIR"].startswith(cache)


def test_the_gateway_has_its_own_role_of_postgresql_and_only_its_options() -> None:
    given = {name: value for name, value in variables(PODS[GATEWAY]).items() if "://" in value}
    assert given["TOKENMILL_DATABASE_URL"].startswith("postgresql+psycopg://gateway:")
    assert set(variables(PODS[GATEWAY])) <= gateway_variables()


def test_a_gateway_s_pod_is_forgotten_before_it_drains_and_has_time_for_that() -> None:
    (container,) = PODS[GATEWAY]["containers"]
    program, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    needed = float(pause) + float(variables(PODS[GATEWAY])["TOKENMILL_GATEWAY_DRAIN_SECONDS"])
    assert PODS[GATEWAY]["terminationGracePeriodSeconds"] >= needed + 10
    assert DOCUMENTS[GATEWAY]["spec"]["replicas"] == 2
    assert DOCUMENTS["PodDisruptionBudget/tokenmill-gateway"]["spec"]["minAvailable"] == 1


def test_the_gateway_s_probes_and_ports_are_those_of_its_calls() -> None:
    (container,) = PODS[GATEWAY]["containers"]
    given = variables(PODS[GATEWAY])
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert ports["http"] == given["TOKENMILL_GATEWAY_PORT"]
    assert ports["metrics"] == given["TOKENMILL_GATEWAY_METRICS_PORT"]
    public = {call.path for call in ALL_CALLS if call.is_public}
    probes = [container[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["httpGet"]["path"] for probe in probes] == ["/healthz", "/healthz", "/readyz"]
    assert {probe["httpGet"]["path"] for probe in probes} <= public
    assert {probe["httpGet"]["port"] for probe in probes} == {"http"}


def test_gateways_and_tasks_write_to_one_volume_of_files() -> None:
    for name in (GATEWAY, "Deployment/tokenmill-tasks"):
        (container,) = PODS[name]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["files"] == variables(PODS[name])["TOKENMILL_FILES"]
        claims = [each.get("persistentVolumeClaim", {}) for each in PODS[name]["volumes"]]
        assert {"claimName": "tokenmill-files"} in claims
    claim = DOCUMENTS["PersistentVolumeClaim/tokenmill-files"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize(
    "name", [name for name in PODS if name.startswith("Deployment") and name != GATEWAY]
)
async def test_probes_use_paths_that_the_server_answers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = PODS[name]["containers"]
    settings = settings_of(PODS[name], monkeypatch)
    assert settings.metrics_host == "0.0.0.0"
    assert container["ports"] == [{"name": "metrics", "containerPort": settings.metrics_port}]
    server = HealthServer("127.0.0.1", 0, CollectorRegistry(), [])
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.get(kind)
        if probe is not None:
            assert probe["httpGet"]["port"] == "metrics"
            assert server.answer("GET", probe["httpGet"]["path"])[0] == 200
    # the only one that a restart repairs: a worker that loads its model is not ended for it
    for kind in {"startupProbe", "livenessProbe"} & set(container):
        assert container[kind]["httpGet"]["path"] == "/livez"


def test_every_selector_matches_a_pod() -> None:
    labels = [
        d["spec"]["template"]["metadata"]["labels"]
        for d in DOCUMENTS.values()
        if d["kind"] == "Deployment"
    ]
    for name, document in DOCUMENTS.items():
        selector = document.get("spec", {}).get("selector")
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert [found for found in labels if wanted.items() <= found.items()], (
                f"{name} selects nothing"
            )
    target = DOCUMENTS["ScaledObject/tokenmill-worker"]["spec"]["scaleTargetRef"]["name"]
    assert f"Deployment/{target}" in DOCUMENTS
    assert "replicas" not in DOCUMENTS[WORKER]["spec"]  # they are KEDA's


def test_the_scaler_reads_the_number_of_workers_that_its_queue_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_of(PODS[WORKER], monkeypatch)
    spec = DOCUMENTS["ScaledObject/tokenmill-worker"]["spec"]
    (trigger,) = spec["triggers"]
    metric = f'tokenmill:queue_workers_wanted{{queue="{settings.queue_name}"}}'
    assert trigger["metadata"]["query"] == f"max({metric})"
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert spec["cooldownPeriod"] >= spec["pollingInterval"]
    assert spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]


def test_the_settings_map_holds_no_secret() -> None:
    data = DOCUMENTS["ConfigMap/tokenmill-settings"]["data"]
    assert not [
        name
        for name, value in data.items()
        if "://" in value or "SECRET" in name or "PASSWORD" in name
    ]
