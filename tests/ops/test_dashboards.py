"""Grafana's dashboard and Prometheus' alerts ask only for what a worker that has worked really
exports; and each alert has its entry in the runbook.
"""

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from tests.support.promql import Catalogue, Unresolved
from tests.support.valkey import ControlledValkey
from tests.support.worker import client_of, database_url, running_worker
from tokenmill_gateway.metrics import GatewayMetrics
from tokenmill_worker.settings import load_settings
from tokenmill_worker.tasks.app import build_app
from tokenmill_worker.tasks.health import TasksHealth
from tokenmill_worker.tasks.resources import TaskResources

pytestmark = pytest.mark.redis
OPS = Path(__file__).parents[2] / "ops"
DASHBOARD: dict[str, Any] = json.loads(
    (OPS / "deploy/grafana/dashboards/tokenmill.json").read_text()
)
ALERTS: dict[str, Any] = yaml.safe_load((OPS / "deploy/prometheus/alerts.yml").read_text())
SCALER: dict[str, Any] = yaml.safe_load((OPS / "deploy/k8s/scaledobject.yaml").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((OPS / "deploy/prometheus/prometheus.yml").read_text())
RULES = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
TARGETS = [(panel, target) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


@pytest.fixture(scope="module")
def exported(
    valkey: ControlledValkey, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Catalogue]:
    """/metrics of a worker that answered, refused, cancelled and survived, and of tasks that ran
    beside it.
    """
    folder = tmp_path_factory.mktemp("dashboards")
    with valkey.client() as client:
        client.flushall()
        scraped = asyncio.run(_work_and_scrape(valkey.url, folder))
        tasks = _tend_and_scrape(database_url(folder))
        yield Catalogue(scraped + tasks + _count_and_expose())
        client.flushall()


def _count_and_expose() -> str:
    """The metrics of a gateway that has answered."""
    metrics = GatewayMetrics(lambda: 1)
    for status in (200, 429, 503):
        metrics.answered("POST /v1/responses", status, 0.1)
    return str(generate_latest(metrics.registry).decode())


def _tend_and_scrape(database: str) -> str:
    """Tasks called in this process: what Celery's signals tell is the same."""
    settings = load_settings(
        {"database_url": database, "webhook_secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
    )
    resources = TaskResources(settings)
    app = build_app(settings, resources)
    watch = TasksHealth(app, resources.backlog, lambda: True, batches=resources.open_batches)
    port = watch.start("127.0.0.1", 0)
    try:
        app.tasks["tokenmill.webhooks.sweep"].apply().get()
        url = f"http://127.0.0.1:{port}/metrics"
        while True:
            text = str(urllib.request.urlopen(url).read().decode())
            if "tokenmill:batches{" in text:  # the database has answered
                return text
            time.sleep(0.05)
    finally:
        watch.stop()
        resources.engine.dispose()


async def _work_and_scrape(redis_url: str, folder: Path) -> str:
    database = database_url(folder)
    async with (
        client_of(redis_url, database) as client,
        running_worker(redis_url, database, metrics_port=0) as worker,
    ):
        prompts = [("interactive", "a"), ("standard", "b"), ("bulk", "c"), ("standard", "[[fail]]")]
        jobs = [
            await client.submit(prompt=p, priority=c, max_tokens=9, ignore_eos=True)
            for c, p in prompts
        ]
        for job in jobs:
            await client.result(job, timeout=60)
        url = f"http://127.0.0.1:{worker.health_port}/metrics"
        async with asyncio.timeout(60):
            while True:
                text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
                # the queue has been read since
                if re.search(r"queue_finished_total\{[^}]*failed", text):
                    return str(text)
                await asyncio.sleep(0.2)


def _plain(expression: str) -> str:
    """Replace Grafana's variables as Grafana does."""
    return expression.replace("$__rate_interval", "1m").replace("$queue", ".*")


@pytest.mark.parametrize(
    ("panel", "target"), TARGETS, ids=lambda value: value.get("title", value.get("refId", ""))
)
def test_every_dashboard_query_matches_exported_metrics(
    exported: Catalogue, panel: dict[str, Any], target: dict[str, Any]
) -> None:
    labels = exported.labels_of(_plain(target["expr"]))
    for name in re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")):
        assert name in labels, (
            f"the legend of {panel['title']!r} wants {name}, the result has {sorted(labels)}"
        )


@pytest.mark.parametrize("trigger", SCALER["spec"]["triggers"], ids=lambda trigger: trigger["name"])
def test_every_autoscaler_query_gives_one_number(
    exported: Catalogue, trigger: dict[str, Any]
) -> None:
    query = trigger["metadata"]["query"].replace("smollm2-135m-instruct", "q")
    assert exported.labels_of(query) == set()


@pytest.mark.parametrize("name", RULES)
def test_every_alert_matches_exported_metrics(exported: Catalogue, name: str) -> None:
    rule = RULES[name]
    labels = exported.labels_of(rule["expr"])
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert label in labels, f"{name} speaks of {label}, the result has {sorted(labels)}"
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_alert_has_its_entry_in_the_runbook() -> None:
    runbook = (OPS / "runbook.md").read_text()
    entries = {}
    for part in re.split(r"(?m)^### ", runbook)[1:]:
        heading, _, body = part.partition("\n")
        entries[heading.strip()] = re.split(r"(?m)^## ", body)[0]
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook"] == f"ops/runbook.md#{name.lower()}"
        for part in ("**Means:**", "**Look:**", "**Repair:**"):
            assert part in entries.get(name, ""), f"the runbook says nothing of {part} for {name}"
    assert {name for name in entries if name.startswith("Tokenmill")} == set(RULES)


def test_the_alert_on_up_names_every_scraped_job() -> None:
    jobs = {config["job_name"] for config in PROMETHEUS["scrape_configs"]}
    assert set(re.findall(r"tokenmill-\w+", RULES["TokenmillWorkerUnreachable"]["expr"])) == jobs
    assert (OPS / "deploy" / "prometheus" / PROMETHEUS["rule_files"][0]).is_file()


def test_panels_do_not_overlap_and_name_their_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("tokenmill:no_such_thing", "no sample"),
        ('tokenmill:queue_jobs{color="red"}', "no label color"),
        ('tokenmill:queue_jobs{priority="urgent"}', "no priority='urgent'"),
        ("sum by (color) (tokenmill:queue_jobs)", "has no"),
        ("tokenmill:queue_jobs / tokenmill:ready", "never match"),
        ("tokenmill:queue_jobs and on (model_name) tokenmill:ready", "both sides"),
    ],
)
def test_a_query_of_a_missing_metric_or_label_is_detected(
    exported: Catalogue, expression: str, words: str
) -> None:
    with pytest.raises(Unresolved, match=words):
        exported.labels_of(expression)
