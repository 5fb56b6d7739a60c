"""Holds ops/deploy/vllm against the schemas of Kubernetes, KEDA and LeaderWorkerSet, against the
settings of the code, and, where VLLM_PYTHON names an environment of vLLM, against its arguments.
"""

import copy
import json
import os
import re
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.ops import test_compose, test_kubernetes
from tests.ops.test_kubernetes import DOCUMENTS, VERSIONS, WORKER, keda_reads, settings_of
from tests.support.vllm import VLLM, needs_vllm
from tokenmill_worker.app import RECORD_DRAIN_S
from tokenmill_worker.contract.name_table import read_arguments
from tokenmill_worker.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ops" / "deploy" / "vllm"
SET_SCHEMA = json.loads((FOLDER.parent / "k8s/schemas/leaderworkerset.json").read_text())
KEYS = ("name", "mountPath")  # of the lists that kubectl and kustomize merge by a key
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "w-0.w.tokenmill"}
SETS = ("two-nodes", "expert-parallel")


def merged(base: Any, patch: Any) -> Any:
    """Return a document with a strategic merge patch, for the lists that the patches have."""
    if isinstance(patch, dict):
        return base | {name: merged(base.get(name, {}), value) for name, value in patch.items()}
    if isinstance(patch, list) and base and isinstance(base[0], dict):
        (key,) = [key for key in reversed(KEYS) if all(key in item for item in base)][:1]
        named = {item[key]: item for item in base}
        return list((named | {i[key]: merged(named.get(i[key], {}), i) for i in patch}).values())
    return patch


def kustomization(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name / "kustomization.yaml").read_text())
    return found


def eight_gpus() -> dict[str, Any]:
    (patch,) = kustomization("eight-gpus")["patches"]
    changed: dict[str, Any] = merged(DOCUMENTS[WORKER], yaml.safe_load(patch["patch"]))
    return changed


def group_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name / "workers.yaml").read_text())
    return found


def templates(name: str) -> list[dict[str, Any]]:
    """Return the pod templates of a LeaderWorkerSet, that of the worker first."""
    found = group_of(name)["spec"]["leaderWorkerTemplate"]
    return [found[key] for key in ("leaderTemplate", "workerTemplate") if key in found]


def scaler_of(name: str) -> dict[str, Any]:
    """Return the ScaledObject with the overlay's JSON patch."""
    changed = copy.deepcopy(DOCUMENTS["ScaledObject/tokenmill-worker"])
    (patch,) = [p for p in kustomization(name)["patches"] if p["target"]["kind"] == "ScaledObject"]
    for step in yaml.safe_load(patch["patch"]):
        *way, last = step["path"].strip("/").split("/")
        place: Any = changed
        for part in way:
            place = place[int(part) if part.isdecimal() else part]
        assert step["op"] == "replace"
        assert last in place
        place[last] = step["value"]
    return changed


def worker_pod(name: str) -> dict[str, Any]:
    template = eight_gpus()["spec"]["template"] if name == "eight-gpus" else templates(name)[0]
    pod: dict[str, Any] = template["spec"]
    return pod


def expanded(text: str) -> str:
    """Replace $(LWS_…) as Kubernetes does."""
    return re.sub(r"\$\((LWS_\w+)\)", lambda found: GROUP[found[1]], text)


def settings_in(name: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    pod = copy.deepcopy(worker_pod(name))
    for entry in pod["containers"][0]["env"]:
        entry |= {key: expanded(value) for key, value in entry.items() if key == "value"}
    return settings_of(pod, monkeypatch)


class Compose(yaml.SafeLoader):
    """Reads compose's tag `!override`: the value replaces a list that would be joined."""


def _list(loader: Compose, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


Compose.add_constructor("!override", _list)


def compose_worker() -> dict[str, Any]:
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["worker-gpu"]
    services = yaml.load((FOLDER / "compose.yaml").read_text(), Compose)["services"]
    assert set(services) == {"worker-gpu"}
    found: dict[str, Any] = base | services["worker-gpu"]
    found["environment"] = base["environment"] | services["worker-gpu"]["environment"]
    return found


def test_every_overlay_is_built_on_the_service_s_files() -> None:
    names = {path.parent.name for path in FOLDER.glob("*/kustomization.yaml")}
    assert names == {"eight-gpus", *SETS}
    (base,) = test_kubernetes.KUSTOMIZATION["images"]
    for name in names:
        content = kustomization(name)
        assert content["resources"][0] == "../../k8s"
        (image,) = content["images"]
        assert image["newName"] == base["newName"] + "-vllm"
        assert image["newTag"] == base["newTag"]
        assert worker_pod(name)["containers"][0]["image"] == image["name"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_of_the_pods_is_in_kubernetes_schema(version: str) -> None:
    kubernetes_validate.validate(eight_gpus(), version, strict=True)
    for name in SETS:
        for template in templates(name):
            document = {
                "apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"},
                "template": template,
            }  # fmt: skip
            kubernetes_validate.validate(document, version, strict=True)
            document["template"] = template | {"sepc": {}}
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", SETS)
def test_every_field_of_a_group_is_in_its_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SET_SCHEMA)
    document = group_of(name)
    jsonschema.validate(document, SET_SCHEMA)
    template = document["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    template["restartpolicy"] = template.pop("restartPolicy")
    with pytest.raises(jsonschema.ValidationError, match="restartpolicy"):
        jsonschema.validate(document, SET_SCHEMA)


@pytest.mark.parametrize("name", SETS)
def test_keda_scales_the_groups_by_the_queue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, group = scaler_of(name), group_of(name)
    jsonschema.validate(scaler, test_kubernetes.SCALER_SCHEMA)
    assert keda_reads(scaler) == scaler
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": group["apiVersion"], "kind": group["kind"], "name": group["metadata"]["name"],
    }  # fmt: skip
    assert "replicas" not in group["spec"]
    size = 1 if name == "two-nodes" else group["spec"]["leaderWorkerTemplate"]["size"]
    assert scaler["spec"]["triggers"][0]["metadata"]["threshold"] == str(size)  # workers of a group
    removed = [p for p in kustomization(name)["patches"] if p["target"]["kind"] == "Deployment"]
    assert [yaml.safe_load(patch["patch"])["$patch"] for patch in removed] == ["delete"]
    assert removed[0]["target"]["name"] == DOCUMENTS[WORKER]["metadata"]["name"]


@pytest.mark.parametrize("name", ["eight-gpus", *SETS])
def test_a_worker_s_variables_are_settings_and_it_has_the_time_to_drain(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(name, monkeypatch)
    assert settings.engine_kind == "vllm"
    assert read_arguments(settings.engine_config().engine_arg)
    assert settings.redis_url.startswith("redis://worker:")
    pod = worker_pod(name)
    needed = settings.drain_seconds + RECORD_DRAIN_S + 10
    assert pod["terminationGracePeriodSeconds"] >= needed
    (container,) = pod["containers"]
    assert settings.engine_python in (FOLDER / "Dockerfile").read_text().replace("pip", "python")
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert container["ports"] == [{"name": "metrics", "containerPort": settings.metrics_port}]


def test_a_worker_has_the_gpus_that_its_arguments_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, needed in (("eight-gpus", 8), ("two-nodes", 8), ("expert-parallel", 1)):
        limits = worker_pod(name)["containers"][0]["resources"]["limits"]
        arguments = read_arguments(settings_in(name, monkeypatch).engine_config().engine_arg)
        assert int(limits["nvidia.com/gpu"]) == needed
        assert int(arguments.get("tensor-parallel-size", "1")) == needed
        assert int(arguments.get("pipeline-parallel-size", "1")) == int(arguments.get("nnodes", 1))
    compose = compose_worker()
    (device,) = compose["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 8
    settings = test_compose._settings(compose, monkeypatch)
    assert read_arguments(settings.engine_config().engine_arg) == {"tensor-parallel-size": "8"}
    assert compose["image"].endswith("-vllm")


def test_the_follower_is_started_with_the_leader_s_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader, follower = (template["spec"] for template in templates("two-nodes"))
    own = read_arguments(settings_in("two-nodes", monkeypatch).engine_config().engine_arg)
    (container,) = follower["containers"]
    theirs = dict(expanded(word).removeprefix("--").split("=") for word in container["args"])
    assert (own.pop("node-rank"), theirs.pop("node-rank")) == ("0", "1")
    assert theirs.pop("max-num-seqs") == "$(TOKENMILL_MAX_NUM_SEQS)"
    assert theirs == own
    assert container["command"][1:] == ["serve", "$(TOKENMILL_MODEL)", "--headless"]
    for same in ("terminationGracePeriodSeconds", "securityContext", "tolerations", "volumes"):
        assert follower[same] == leader[same]
    for same in ("image", "envFrom", "resources", "securityContext", "volumeMounts"):
        assert container[same] == leader["containers"][0][same]


@pytest.mark.parametrize("name", ["eight-gpus", *SETS])
def test_pods_of_vllm_run_as_unprivileged_as_the_others(name: str) -> None:
    base = test_kubernetes.PODS[WORKER]
    for pod in [t["spec"] for t in templates(name)] if name in SETS else [worker_pod(name)]:
        (container,) = pod["containers"]
        for same in ("securityContext", "automountServiceAccountToken", "tolerations"):
            assert pod[same] == base[same]
        assert container["securityContext"] == base["containers"][0]["securityContext"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm", "/home/tokenmill/.cache"} == set(mounts)
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}


# ── commands in the pods ──


class Page:
    """A server on loopback that answers every connection with these bytes, as a worker's does."""

    def __init__(self, body: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._body = body
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                with self._socket.accept()[0] as one:
                    one.settimeout(0.5)
                    try:
                        one.recv(1000)
                    except TimeoutError:
                        continue
                    one.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + self._body)
        except OSError:
            return

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("engine", "status"), [("ok", 0), ("the engine is not running", 1)])
def test_a_worker_whose_engine_has_died_fails_its_liveness_probe(
    name: str, engine: str, status: int
) -> None:
    (container,) = worker_pod(name)["containers"]
    *shell, line = container["livenessProbe"]["exec"]["command"]
    assert shell == ["bash", "-c"]
    page = Page(json.dumps({"checks": {"engine": engine}}, separators=(",", ":")).encode())
    line = line.replace("/9090;", f"/{page.port};")
    assert subprocess.run([*shell, line], check=False, timeout=60).returncode == status
    page.close()
    assert subprocess.run([*shell, line], check=False, capture_output=True).returncode != 0


@pytest.mark.parametrize("name", SETS)
def test_a_group_that_loads_is_not_killed_for_being_unready(name: str) -> None:
    (container,) = worker_pod(name)["containers"]
    startup = container["startupProbe"]
    assert startup["exec"] == container["livenessProbe"]["exec"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 7200


def test_the_follower_waits_until_the_leader_is_gone() -> None:
    (container,) = templates("two-nodes")[1]["spec"]["containers"]
    *shell, line = container["lifecycle"]["preStop"]["exec"]["command"]
    page = Page(b"")
    line = line.replace("/9090", f"/{page.port}")
    environment = {**os.environ, "LWS_LEADER_ADDRESS": "127.0.0.1"}  # noqa: TID251 - a child's
    process = subprocess.Popen([*shell, line], env=environment, stderr=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    page.close()
    process.wait(60)


# ── vLLM's own arguments ──


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_has_every_argument_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter refuses a name that vLLM lacks, and a value that it cannot read."""
    given = [
        read_arguments(settings_in(name, monkeypatch).engine_arg) for name in ("eight-gpus", *SETS)
    ]
    code = (
        "import json, sys\n"
        "from tokenmill_worker.engines.vllm.arguments import _parsed\n"
        "for given in json.loads(sys.argv[1]):\n"
        "    args = _parsed('.', given)\n"
        "    for name, value in given.items():\n"
        "        assert str(getattr(args, name.replace('-', '_'))).lower() == value, name\n"
        "print('taken')"
    )
    path = ":".join(str(ROOT / folder) for folder in ("worker", "schemas"))
    environment = {**os.environ, "PYTHONPATH": path}  # noqa: TID251 - a child's

    def read(given: object) -> subprocess.CompletedProcess[str]:
        command = [str(VLLM), "-c", code, json.dumps(given)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=500, check=False
        )

    done = read(given)
    assert done.stdout.endswith("taken\n"), done.stderr[-2000:]
    assert "vLLM has no such argument" in read([{"tensor-paralel-size": "8"}]).stderr
