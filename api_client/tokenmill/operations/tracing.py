"""The producer's part of a trace: jobs carry the context of the span in which they were submitted.

If the program uses OpenTelemetry, submitting creates a producer span under the current one. Every
job without a `traceparent` of its own gets that span's context (W3C Trace Context), which the
worker continues. Otherwise nothing happens. OpenTelemetry is never imported here: a program that
traces has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill_schemas.job import JobRequest

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


@contextmanager
def producing(
    queue: str, requests: Sequence[JobRequest], provider: TracerProvider | None = None
) -> Iterator[Sequence[JobRequest]]:
    """Yield the requests, with a trace context in those that had none. An exception in the block is
    recorded on the span.

    `provider` creates the span; None uses the program's own provider.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")  # a program that traces has imported it
    if trace is None or not requests:
        yield requests
        return
    attributes: dict[str, str | int] = {
        "messaging.system": "tokenmill",
        "messaging.operation.type": "send",
        "messaging.destination.name": queue,
        "messaging.batch.message_count": len(requests),
    }
    if len(requests) == 1:
        attributes["messaging.message.id"] = requests[0].job_id
    tracer = trace.get_tracer("tokenmill", tracer_provider=provider)
    with tracer.start_as_current_span(
        f"send {queue}", kind=trace.SpanKind.PRODUCER, attributes=attributes
    ) as span:
        context = _traceparent(span.get_span_context())
        yield [
            request if request.traceparent or not context else _with(request, context)
            for request in requests
        ]


def _traceparent(context: Any) -> str | None:
    """Return a span context in the form of W3C Trace Context; None outside a trace."""
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"


def _with(request: JobRequest, context: str) -> JobRequest:
    return msgspec.structs.replace(request, traceparent=context)
