"""One trace from the producer's span to the recorded row, by the real SDK; off unless it is asked
for.
"""

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.worker import client_of, database_url, running_worker
from tokenmill.operations.submit import build_request
from tokenmill.operations.tracing import producing
from tokenmill_schemas import JobRequest
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings import load_settings
from tokenmill_worker.telemetry.tracing import JobSpan, SpanPhase, Tracing

PRODUCER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """An OTLP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(
                {a.key: a.value.string_value for a in resource.resource.attributes}
            )
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.stop()


@pytest.fixture
def memory() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


@pytest.mark.redis
async def test_a_job_s_trace_goes_from_its_producer_to_its_row(
    redis_url: str, tmp_path: Path, collector: Collector
) -> None:
    """The producer and the worker each export what they know; in the collector it is one tree."""
    database = database_url(tmp_path)
    backend = TracerProvider(shutdown_on_exit=False)
    backend.add_span_processor(
        SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces"))
    )
    asked = {"prompt": "my secret", "max_tokens": 12, "ignore_eos": True, "tenant": "acme"}
    async with (
        running_worker(redis_url, database, otel_endpoint=collector.url + "/", worker_id="w7"),
        client_of(redis_url) as client,
    ):
        # as submit does, with the program's own
        with producing("q", [build_request(asked)], backend) as (request,):
            job = await client.submit(request)
        result = await client.result(job, timeout=60)
        bare = await client.submit(prompt="no producer", max_tokens=2, ignore_eos=True)
        await client.result(bare, timeout=60)
    backend.shutdown()
    # the worker has ended, so everything was flushed
    (sent,) = (
        span for span in collector.spans if span.name == "send q" and not span.parent_span_id
    )
    spans = [
        span for span in collector.spans if span.trace_id == sent.trace_id and span is not sent
    ]
    by_name = {span.name: span for span in spans}
    assert sorted(by_name) == ["decode", "job q", "prefill", "queue wait", "record"]
    root = by_name["job q"]
    assert root.parent_span_id == sent.span_id
    assert all(span.parent_span_id == root.span_id for span in spans if span is not root)
    attributes = {a.key: a.value for a in root.attributes}
    assert attributes["messaging.message.id"].string_value == job
    assert attributes["gen_ai.usage.output_tokens"].int_value == 12
    assert attributes["tokenmill.status"].string_value == "succeeded"
    assert attributes["tokenmill.worker"].string_value == "w7"
    order = [by_name[name] for name in ("queue wait", "prefill", "decode", "record")]
    for earlier, later in itertools.pairwise(order):
        assert (
            earlier.start_time_unix_nano <= earlier.end_time_unix_nano <= later.start_time_unix_nano
        )
    assert root.start_time_unix_nano == order[0].start_time_unix_nano
    assert root.end_time_unix_nano == order[-1].end_time_unix_nano
    assert "w7" in {resource.get("service.instance.id") for resource in collector.resources}
    exported = str(collector.spans)
    assert "my secret" not in exported
    assert result.text[:8] not in exported
    roots = [span for span in collector.spans if span.name == "job q" and not span.parent_span_id]
    assert len(roots) == 1  # the job without a producer begins a trace of its own


@pytest.mark.redis
async def test_the_trace_of_a_job_has_a_span_of_every_worker_that_had_it(
    redis_url: str, tmp_path: Path, collector: Collector
) -> None:
    database = database_url(tmp_path)
    options: dict[str, Any] = {
        "otel_endpoint": collector.url,
        "model": "synthetic?step_ms=10",
        "drain_seconds": 0.0,
    }
    async with client_of(redis_url) as client:
        async with running_worker(redis_url, database, worker_id="first", **options):
            job = await client.submit(
                prompt="long", max_tokens=60, ignore_eos=True, traceparent=PRODUCER
            )
            async for chunk in client.stream(job):
                if chunk.index >= 3:
                    break
        async with running_worker(redis_url, database, worker_id="second", **options):
            await client.result(job, timeout=60)
    stories = {}
    for span in collector.spans:
        if span.name == "job q":
            attributes = {a.key: a.value for a in span.attributes}
            stories[attributes["tokenmill.worker"].string_value] = attributes
    assert sorted(stories) == ["first", "second"]
    assert stories["first"]["tokenmill.left"].string_value == "handed_over"
    assert stories["second"]["tokenmill.deliveries"].int_value == 2
    here = [stories[name]["tokenmill.tokens_here"].int_value for name in ("first", "second")]
    assert here[0] > 0 < here[1]
    assert sum(here) >= 60


def test_submitting_makes_a_producer_span_under_the_current_one(
    memory: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    provider, exporter = memory
    mine = JobRequest(job_id="a", prompt="x")
    given = JobRequest(job_id="b", prompt="y", traceparent=PRODUCER)
    with producing("q", [mine, given], provider) as (first, second):
        assert second is given
    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    assert span.name == "send q"
    assert span.kind is trace.SpanKind.PRODUCER
    assert first.traceparent is not None
    version, trace_id, span_id, flags = first.traceparent.split("-")
    assert (version, trace_id, span_id) == (
        "00",
        f"{span.context.trace_id:032x}",
        f"{span.context.span_id:016x}",
    )
    assert int(flags, 16) & 1  # sampled
    assert span.attributes is not None
    assert span.attributes["messaging.batch.message_count"] == 2


def test_a_malformed_traceparent_begins_a_new_trace(
    memory: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    provider, exporter = memory
    for odd in ("", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 10_000):
        assert (
            Tracing(provider).export(JobSpan("job", odd, [SpanPhase("decode", 5, 3)])) is not None
        )
    assert all(span.parent is None for span in exporter.get_finished_spans() if span.name == "job")


def test_a_job_whose_producer_did_not_sample_is_not_traced(
    memory: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    provider, exporter = memory
    assert (
        Tracing(provider).export(JobSpan("job", PRODUCER[:-1] + "0", [SpanPhase("decode", 1, 2)]))
        is None
    )
    assert not exporter.get_finished_spans()


def test_opentelemetrys_variables_choose_the_jobs_that_are_traced(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    tracing = Tracing.open(collector.url, resource={})
    phases = [SpanPhase("decode", 1, 2)]
    assert tracing.export(JobSpan("job", None, phases)) is None
    assert tracing.export(JobSpan("job", PRODUCER, phases)) is not None
    tracing.close()
    assert sorted(span.name for span in collector.spans) == ["decode", "job"]


def test_without_the_opentelemetry_package_only_tracing_is_missing() -> None:
    program = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from tokenmill import Client
from tokenmill.operations.tracing import producing
from tokenmill_schemas import JobRequest
with producing("q", [JobRequest(job_id="a", prompt="x")]) as (request,):
    assert request.traceparent is None
from tokenmill_worker.builders import open_tracing
from tokenmill_worker.errors import MissingPackage
from tokenmill_worker.settings import load_settings
assert open_tracing(load_settings({}, strict=False)) is None
try:
    open_tracing(load_settings({"otel_endpoint": "http://127.0.0.1:4318"}, strict=False))
except MissingPackage as error:
    assert "pip install '.[otel]'" in str(error)
else:
    raise AssertionError("it was not missed")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_an_invalid_otel_endpoint_is_refused_at_the_start() -> None:
    with pytest.raises(SettingsError, match="otel-endpoint"):
        load_settings({"otel_endpoint": "collector:4318"}, strict=False)
