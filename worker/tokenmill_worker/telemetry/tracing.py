"""OpenTelemetry: one job in one worker becomes a span with its phases inside, under the producer's
span.

    (producer: send QUEUE) ─▶ job QUEUE ─┬─ queue wait ─┬─ prefill ─┬─ decode ─┬─ record

Spans are made from recorded timestamps when the job leaves this worker, so tracing costs nothing
while the job runs. It needs the extra `otel` and is off without an endpoint. Attributes follow the
conventions for messaging and for generative AI; none of them holds a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tokenmill_worker.errors import MissingPackage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
_FLUSH_MS = 5_000


@dataclass(frozen=True, slots=True)
class SpanPhase:
    """A part of a job's span; times are Unix nanoseconds."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class JobSpan:
    """The span of one job in one worker, with its phases. `traceparent` is the producer's, as the
    job carried it.
    """

    name: str
    traceparent: str | None
    phases: Sequence[SpanPhase]
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None

    @property
    def start_ns(self) -> int:
        return min(phase.start_ns for phase in self.phases)

    @property
    def end_ns(self) -> int:
        return max(phase.end_ns for phase in self.phases)


class Tracing:
    """Exports spans through a tracer provider, which `close` shuts down."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tokenmill")

    @classmethod
    def open(cls, endpoint: str, *, resource: Mapping[str, str]) -> Self:
        """Export by OTLP over HTTP to `endpoint`/v1/traces. OpenTelemetry's own variables choose
        which traces are sampled, by default as the producer decided, and those of jobs without a
        producer. Raises MissingPackage.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise MissingPackage(
                "otel_endpoint is set, but OpenTelemetry is not installed: pip install '.[otel]' "
                "in tokenmill's folder"
            ) from error
        provider = TracerProvider(resource=Resource.create(dict(resource)), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def export(self, job: JobSpan) -> str | None:
        """Export one job's span. Returns the trace id in hexadecimal, or None if the trace is not
        sampled.
        """
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent = _context_of(job.traceparent)
        span: Any = self._tracer.start_span(
            job.name,
            context=parent,
            kind=SpanKind.CONSUMER,
            start_time=job.start_ns,
            attributes=job.attributes,
        )
        if not span.is_recording():
            return None
        inside = trace.set_span_in_context(span, Context())
        for phase in job.phases:
            child = self._tracer.start_span(phase.name, context=inside, start_time=phase.start_ns)
            child.end(max(phase.start_ns, phase.end_ns))
        if job.error is not None:
            span.set_status(Status(StatusCode.ERROR, job.error))
        span.end(job.end_ns)
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Send the waiting spans within five seconds, and shut down."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def _context_of(traceparent: str | None) -> Any:
    """Return the context of a traceparent. A malformed one counts as none: a job is not refused for
    its trace.
    """
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent} if traceparent else {}
    return TraceContextTextMapPropagator().extract(carrier, Context())
