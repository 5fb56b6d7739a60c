"""Log lines keep users' text out, health fails when nothing moves, metrics count what happened."""

import ast
import asyncio
import io
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.record.support import result
from tokenmill_schemas.result import JobError
from tokenmill_worker.telemetry import Check, HealthServer, Metrics, Watchdog, configure_logging
from tokenmill_worker.telemetry.instruments import counter, gauge


@pytest.fixture
def log_to() -> Iterator[Callable[..., io.StringIO]]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level

    def configure(form: str, **options: object) -> io.StringIO:
        stream = io.StringIO()
        configure_logging("info", form, stream=stream, **options)  # type: ignore[arg-type]
        return stream

    yield configure
    logging.captureWarnings(False)
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in before:
        root.addHandler(handler)
    root.setLevel(level)


@pytest.mark.parametrize("form", ["text", "json"])
def test_prompts_are_logged_only_with_the_setting(
    form: str, log_to: Callable[..., io.StringIO]
) -> None:
    for allowed in (False, True):
        stream = log_to(form, with_private=allowed)
        logging.getLogger("worker.x").info(
            "admitted", extra={"job_id": "j1", "private": {"prompt": "a secret"}}
        )
        assert ("a secret" in stream.getvalue()) == allowed
        assert "j1" in stream.getvalue()


def test_json_log_lines_are_valid_json_with_any_content(log_to: Callable[..., io.StringIO]) -> None:
    stream = log_to("json", context={"worker": "w1"})
    logging.getLogger("x").warning("line\nbreak %s", "é", extra={"odd": object()})
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("x").exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["message"], first["level"], first["worker"]) == ("line\nbreak é", "warning", "w1")
    assert "ValueError: inner" in second["exception"]


def test_a_text_line_cannot_be_forged(log_to: Callable[..., io.StringIO]) -> None:
    stream = log_to("text")
    logging.getLogger("x").info("job %s", "a\n12:00:00 ERROR all is lost", extra={"name_": "b\nc"})
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_line_holds_no_control_character(
    form: str, log_to: Callable[..., io.StringIO]
) -> None:
    stream = log_to(form)
    hostile = "\x1b]0;title\x07\x9b31m\x7f\u2028\ud800"
    logging.getLogger("x").info("job %s", hostile, extra={"tenant": hostile})
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("x").exception("failed")
    shown = stream.getvalue()
    assert shown.count("title") == 3
    assert not [x for x in shown if x != "\n" and not x.isprintable()]
    if form == "json":
        first, *_ = (json.loads(line) for line in shown.splitlines())
        assert first["tenant"] == hostile


@pytest.mark.parametrize(
    "value",
    ["a b=c", 'a" b=c', "a\\", 'a\\" b=c', "a\n b=c", "a\tb=c", "a\u00a0b=c", "=", "", "a\x1bb"],
)
def test_a_log_value_cannot_forge_a_field(value: str, log_to: Callable[..., io.StringIO]) -> None:
    stream = log_to("text")
    logging.getLogger("x").info("done", extra={"tenant": value, "tokens": 4})
    _, _, words = stream.getvalue().rstrip("\n").partition("x: done ")
    first, second = re.findall(r'\w+=(?:"(?:[^"\\]|\\.)*"|[^\s"=]*)(?= |$)', words)
    assert " ".join((first, second)) == words
    shown = first.removeprefix("tenant=")
    read = ast.literal_eval(shown if shown.startswith('"') else f'"{shown}"')
    assert (read, second) == (value, "tokens=4")


def test_an_overdue_watchdog_reports_a_problem() -> None:
    now = [100.0]
    watchdog = Watchdog("claim", 5.0, clock=lambda: now[0])
    now[0] = 104.0
    assert watchdog.problem() is None
    now[0] = 106.0
    assert watchdog.problem() == "no claim for 6 s (limit 5 s)"
    watchdog.reset()
    assert watchdog.problem() is None


def test_metrics_count_a_finished_job() -> None:
    metrics = Metrics("q", "tiny")
    metrics.request_finished(result(), "standard")
    metrics.add_source(
        lambda: [counter("steps", "Steps", 7), gauge("now", "Now", 2), gauge("away", "Away", None)]
    )
    text = generate_latest(metrics.registry).decode()
    for name, labels, value in (
        ("jobs_finished_total", {"priority": "standard", "status": "succeeded"}, 1.0),
        ("request_success_total", {"finished_reason": "stop"}, 1.0),
        ("request_generation_tokens_sum", {"priority": "standard"}, 3.0),
        ("time_to_first_token_seconds_sum", {"priority": "standard"}, 0.02),
        ("request_time_per_output_token_seconds_sum", {"priority": "standard"}, 0.035),
        ("steps_total", {}, 7.0),
        ("now", {}, 2.0),
    ):
        wanted = {"queue": "q", "model_name": "tiny", **labels}
        assert metrics.registry.get_sample_value(f"tokenmill:{name}", wanted) == pytest.approx(
            value
        ), name
    assert "away" not in text
    assert "acme" not in text  # no tenant is a label


def test_the_first_job_of_each_end_shows_as_an_increase() -> None:
    metrics = Metrics("q", "tiny")
    for name, labels in (
        ("jobs_finished_total", {"priority": "bulk", "status": "failed"}),
        ("jobs_finished_total", {"priority": "standard", "status": "dead"}),
        ("request_success_total", {"finished_reason": "cancelled"}),
    ):
        wanted = {"queue": "q", "model_name": "tiny", **labels}
        assert metrics.registry.get_sample_value(f"tokenmill:{name}", wanted) == 0.0, labels


def test_errors_are_counted_by_code() -> None:
    metrics = Metrics("q", "tiny")
    for error in (None, JobError("engine_error", "broken"), JobError("engine_error", "again")):
        metrics.request_finished(result(error=error), "standard")
    labels = {"queue": "q", "model_name": "tiny", "code": "engine_error"}
    assert metrics.registry.get_sample_value("tokenmill:job_errors_total", labels) == 2.0


def test_two_workers_in_one_process_have_separate_metrics() -> None:
    one, two = Metrics(), Metrics()
    one.left.labels("lost").inc()
    labels = {"queue": "", "model_name": "", "reason": "lost"}
    values = [
        metrics.registry.get_sample_value("tokenmill:jobs_left_total", labels)
        for metrics in (one, two)
    ]
    assert values == [1.0, 0.0]


def test_prometheus_reads_a_fast_histogram() -> None:
    metrics = Metrics()
    histogram = metrics.inter_token.of("bulk")
    histogram.observe(0.01)
    histogram.observe(0.011, times=3)
    histogram.observe(99.0)
    families = {family.name: family for family in parse(generate_latest(metrics.registry).decode())}
    samples = families["tokenmill:inter_token_latency_seconds"].samples
    buckets = {
        sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")
    }
    assert (
        buckets["0.005"],
        buckets["0.01"],
        buckets["0.02"],
        buckets["10.0"],
        buckets["+Inf"],
    ) == (0, 1, 4, 4, 5)
    sums = {
        sample.name.rsplit("_", 1)[1]: sample.value
        for sample in samples
        if "le" not in sample.labels
    }
    assert sums == {"count": 5, "sum": pytest.approx(99.043)}


@pytest.fixture
async def watched() -> AsyncIterator[tuple[HealthServer, dict[str, str | None]]]:
    problems: dict[str, str | None] = {"steps": None, "sql": None, "drain": None}
    checks = [
        Check("steps", lambda: problems["steps"], vital=True),
        Check("sql", lambda: problems["sql"]),
        Check("drain", lambda: problems["drain"], ready=True),
    ]
    server = await HealthServer("127.0.0.1", 0, Metrics().registry, checks).start()
    yield server, problems
    await server.stop()


async def _get(server: HealthServer, request: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request.encode())
    data = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = data.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def test_health_pages_name_failing_checks_and_whether_a_restart_helps(
    watched: tuple[HealthServer, dict[str, str | None]],
) -> None:
    server, problems = watched

    async def look() -> list[int]:
        paths = ("/healthz", "/readyz", "/livez")
        return [(await _get(server, f"GET {path} HTTP/1.1\r\n\r\n"))[0] for path in paths]

    assert await look() == [200, 200, 200]
    problems["drain"] = "it drains"
    assert await look() == [200, 503, 200]
    problems["sql"] = "connection refused"
    assert await look() == [503, 503, 200]
    _, body = await _get(server, "GET /healthz HTTP/1.1\r\n\r\n")
    assert json.loads(body) == {
        "status": "failing",
        "checks": {"steps": "ok", "sql": "connection refused"},
    }
    problems["steps"] = "no step for 200 s"
    assert await look() == [503, 503, 503]


async def test_the_health_server_refuses_unknown_paths_and_methods(
    watched: tuple[HealthServer, dict[str, str | None]],
) -> None:
    server, _ = watched
    status, body = await _get(server, "GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n")
    assert status == 200
    assert "tokenmill:jobs_left_total" in body
    assert (await _get(server, "GET /etc/passwd HTTP/1.1\r\n\r\n"))[0] == 404
    assert (await _get(server, "POST /metrics HTTP/1.1\r\n\r\n"))[0] == 405
    assert (await _get(server, "nonsense\r\n\r\n"))[0] == 400
    assert await _get(server, "HEAD /livez HTTP/1.1\r\n\r\n") == (200, "")


def test_a_health_check_that_raises_counts_as_failed() -> None:
    def broken() -> str | None:
        raise LookupError("gone")

    server = HealthServer("127.0.0.1", 0, Metrics().registry, [Check("x", broken)])
    assert server.report() == (False, {"x": "the check itself failed: gone"})
