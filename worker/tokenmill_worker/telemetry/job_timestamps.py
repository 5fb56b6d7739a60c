"""Records when things happened to one job in this worker, and makes its span when it has left.

The span is for a trace, and holds no prompt and no answer. OpenTelemetry and Prometheus are used
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.telemetry.tracing import JobSpan, SpanPhase

NS_PER_MS = 1_000_000


@dataclass(slots=True)
class JobTimestamps:
    """Timestamps of one job in Unix nanoseconds; 0 means that it did not happen. `last_ns` is per
    choice, since choices differ in pace.
    """

    delivery: Delivery
    claimed_ns: int
    request: JobRequest | None = None
    kind: tuple[str, str] = ("", "")  # priority and tenant, by which its tokens are counted
    started_ns: int = 0
    first_ns: int = 0
    last_ns: dict[int, int] = field(default_factory=dict)
    tokens: int = 0

    @property
    def latest_ns(self) -> int:
        return max(self.last_ns.values(), default=self.first_ns)

    def phases(self, end_ns: int, finished_ns: int = 0) -> list[SpanPhase]:
        """Return the phases in order and without gaps, from the queue to the end. `finished_ns`:
        when recording began.
        """
        phases = []
        # later deliveries also waited for the sweep, for a time that is not known
        if self.delivery.deliveries == 1:
            created_ns = min(self.delivery.created_ms * NS_PER_MS, self.claimed_ns)
            phases.append(SpanPhase("queue wait", created_ns, self.claimed_ns))
        generated = self.claimed_ns
        if self.started_ns:
            prefilled = self.first_ns or finished_ns or end_ns
            phases.append(SpanPhase("prefill", self.started_ns, prefilled))
            generated = prefilled
        if self.first_ns:
            phases.append(SpanPhase("decode", self.first_ns, self.latest_ns))
            generated = self.latest_ns
        if finished_ns:
            phases.append(
                SpanPhase(
                    "record", max(finished_ns, generated), max(end_ns, finished_ns, generated)
                )
            )
        return phases or [SpanPhase("handed over", self.claimed_ns, end_ns)]

    def span(
        self, queue: str, worker_id: str, end_ns: int, result: JobResult | None, left: str
    ) -> JobSpan:
        """Return the job's span. `result` is that of a recorded job; else `left` is the reason why
        the job left this worker.
        """
        request, delivery = self.request, self.delivery
        attributes: dict[str, str | int | float | bool | list[str]] = {
            "messaging.system": "tokenmill",
            "messaging.operation.type": "process",
            "messaging.destination.name": queue,
            "messaging.message.id": delivery.job_id,
            "tokenmill.worker": worker_id,
            "tokenmill.deliveries": delivery.deliveries,
            "tokenmill.tokens_here": self.tokens,
        }
        if request is not None:
            attributes |= {
                "tokenmill.priority": request.priority.value,
                "tokenmill.tenant": request.tenant,
            }
        error = None
        if result is not None:
            attributes |= _outcome(result)
            if result.error is not None:
                attributes["error.type"] = result.error.code
                error = result.error.code  # the message may quote the request
        else:
            attributes["tokenmill.left"] = left
        # A result's times are whole milliseconds: never before the last token, which was noted more
        # finely.
        finished_ns = (
            max(result.finished_ms * NS_PER_MS, self.latest_ns) if result is not None else 0
        )
        traceparent = request.traceparent if request is not None else None
        return JobSpan(
            f"job {queue}", traceparent, self.phases(end_ns, finished_ns), attributes, error
        )


def _outcome(result: JobResult) -> dict[str, str | int | float | bool | list[str]]:
    usage = result.usage
    reasons = [
        choice.finish_reason.value for choice in result.choices if choice.finish_reason is not None
    ]
    return {
        "tokenmill.status": result.status.value,
        "tokenmill.preemptions": usage.preemptions,
        "gen_ai.request.model": result.model,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.response.time_to_first_chunk": usage.ttft_ms / 1000,
    }
