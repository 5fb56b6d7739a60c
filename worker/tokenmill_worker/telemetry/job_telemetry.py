"""Follows every job through this worker, and feeds metrics, log, traces and the heartbeat.

The stages report to it through `jobs.JobObserver` and depend on nothing else of it. In each step it
only stores the frame with its time. Tokens are counted about ten times a second, when the engine
sends its figures, and before the numbers are read. Everything else waits until the job has left.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

from tokenmill.operations.submit import estimated_tokens
from tokenmill_schemas.control import TenantLoad
from tokenmill_schemas.job import Priority
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.contract.events import EngineStats, TokenEvent
from tokenmill_worker.contract.messages import Frame
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob, JobObserver
from tokenmill_worker.telemetry import Metrics, Tracing
from tokenmill_worker.telemetry.job_timestamps import JobTimestamps
from tokenmill_worker.telemetry.rolling import RollingPercentiles, RollingRate

log = logging.getLogger("tokenmill_worker.jobs")

MAX_TENANTS = 20  # in a heartbeat: the tenants with the most tokens


class JobTelemetry(JobObserver):
    """Observes the jobs of one worker. No job can make its methods raise."""

    def __init__(
        self,
        metrics: Metrics,
        tracing: Tracing | None,
        *,
        queue: str,
        worker_id: str,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._queue, self._worker_id = queue, worker_id
        self._clock_ns = clock_ns
        self._stamps: dict[str, JobTimestamps] = {}  # by job id
        self._running: dict[str, JobTimestamps] = {}  # the running ones, by request id
        # (time, frame) of frames whose tokens are not counted yet
        self._frames: list[tuple[int, Frame]] = []
        self._stats = EngineStats()
        self.tokens = RollingRate()
        self.ended_tokens = RollingRate()  # estimated ones, as they count while a job waits
        self.first_token_s, self.token_s, self.queue_s = (
            RollingPercentiles(),
            RollingPercentiles(),
            RollingPercentiles(),
        )
        self.redis_round_trips: Counter[str] = Counter()
        self.redis_failures: Counter[str] = Counter()
        self._num_lines = 0  # of batches, that succeeded and are not logged yet
        self._tenant_tokens: Counter[str] = Counter()
        self._tenant_rates: dict[str, RollingRate] = {}

    # ── reports of the stages (jobs.JobObserver) ──

    def claimed(self, deliveries: Sequence[Delivery]) -> None:
        now = self._clock_ns()
        for delivery in deliveries:
            self._take_out(delivery.job_id)
            self._stamps[delivery.job_id] = JobTimestamps(delivery, now)
            self._metrics.deliveries.labels(
                delivery.outcome, str(delivery.deliveries > 1).lower()
            ).inc()

    def started(self, jobs: Sequence[AdmittedJob]) -> None:
        now = self._clock_ns()
        for job in jobs:
            stamps = self._stamps.get(job.job_id)
            if stamps is not None:
                self._running[job.request_id] = stamps
                stamps.request, stamps.started_ns = job.request, now
                stamps.kind = job.request.priority.value, job.request.tenant
            if job.request.tenant not in self._tenant_rates:
                rate = self._tenant_rates[job.request.tenant] = RollingRate()
                rate.add(self._tenant_tokens[job.request.tenant])

    def stepped(self, frame: Frame) -> None:
        """Store a frame whose tokens have been published."""
        self._frames.append((self._clock_ns(), frame))
        if frame.stats is not None:
            self._count()
            self._count_steps(frame.stats)

    def _count(self) -> None:
        """Count the tokens of the stored frames. Code that runs rarely finds cold CPU caches, so
        six frames together cost little more than one.
        """
        frames, self._frames = self._frames, []
        for now, frame in frames:
            self._count_tokens(now, frame.events)

    def _count_tokens(self, now: int, events: Sequence[TokenEvent]) -> None:
        # (kind, token before, tokens at once): events
        alike: Counter[tuple[tuple[str, str], int, int]] = Counter()
        kind, before, each, in_row = ("", ""), 0, 0, 0  # neighbouring events are usually alike
        running = self._running
        for event in events:
            count = len(event.token_ids)
            stamps = running.get(event.request_id) if count else None
            if stamps is None:
                continue
            stamps.tokens += count
            last = stamps.last_ns.get(event.choice, 0)
            stamps.last_ns[event.choice] = now
            if not last and not stamps.first_ns:
                self._first_token(stamps, now)
            if last != before or count != each or stamps.kind != kind:
                alike[kind, before, each] += in_row
                kind, before, each, in_row = stamps.kind, last, count, 0
            in_row += 1
        alike[kind, before, each] += in_row
        gap = None
        in_all = 0
        for ((priority, tenant), last, count), num_events in alike.items():
            num_tokens = num_events * count
            if not num_tokens:
                continue
            in_all += num_tokens
            self._tenant_tokens[tenant] += num_tokens
            if last:
                gap = (now - last) / 1e9 / count
                self._metrics.inter_token.of(priority).observe(gap, num_tokens)
        if gap is not None:
            self.token_s.add(gap)
        self.tokens.add(self.tokens.total + in_all)

    def left(self, job_ids: Iterable[str], reason: str) -> None:
        """Record that jobs left this worker without an end; `reason` is one word."""
        for job_id in job_ids:
            stamps = self._take_out(job_id)
            if stamps is not None:
                self._metrics.left.labels(reason).inc()
                self._export(stamps, None, reason)

    def recorded(self, finished: Sequence[FinishedJob]) -> None:
        """Record jobs whose rows are committed. Of the lines of batches, which come by the million,
        only failed ones are logged by name, and the others are counted for `log_lines`.
        """
        good = (item for item in finished if item.result.status is JobStatus.SUCCEEDED)
        tokens = sum(estimated_tokens(item.request) for item in good if item.request is not None)
        self.ended_tokens.add(self.ended_tokens.total + tokens)
        for item in finished:
            result = item.result
            priority = item.request.priority.value if item.request is not None else ""
            self._metrics.request_finished(result, priority)
            stamps = self._take_out(result.job_id)
            trace_id = None
            if stamps is not None:
                stamps.request = stamps.request or item.request
                trace_id = self._export(stamps, item, "")
            is_line = _is_good_line(item)
            self._num_lines += is_line
            level = logging.DEBUG if is_line else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "Job %s", result.status.value, extra=_fields(item, trace_id))

    # ── reports of JobStream ──

    def called(self, script: str, seconds: float, round_trips: int, is_done: bool) -> None:
        self._metrics.call_seconds.of(script).observe(seconds)
        self.redis_round_trips[script] += round_trips
        if not is_done:
            self.redis_failures[script] += 1

    def refused(self, call: str, count: int) -> None:
        self._metrics.refusals.labels(call).inc(count)

    def lost_by_server(self, count: int) -> None:
        self._metrics.lost_by_server.inc(count)

    # ── numbers for the heartbeat ──

    def log_lines(self) -> None:
        """Log how many lines of batches succeeded since the last call, if any did."""
        if self._num_lines:
            log.info("Lines of batches succeeded", extra={"jobs": self._num_lines})
            self._num_lines = 0

    def forget_all_but(self, held: Container[str]) -> None:
        """Drop the timestamps of jobs that are not in `held`. Jobs whose end SQL had already leave
        without being recorded.
        """
        self._count()
        for job_id in [job_id for job_id in self._stamps if job_id not in held]:
            self._take_out(job_id)

    def urgent(self) -> int:
        """Return the number of running jobs that are no bulk jobs."""
        return sum(stamps.kind[0] != Priority.BULK for stamps in self._running.values())

    def tenants(self) -> dict[str, TenantLoad]:
        """Return the load of the busiest tenants that have jobs here or had tokens a moment ago."""
        self._count()
        running = Counter(stamps.kind[1] for stamps in self._stamps.values() if stamps.started_ns)
        for name, rate in self._tenant_rates.items():
            rate.add(self._tenant_tokens[name])
        loads = {
            name: TenantLoad(running=running[name], tokens_per_s=round(rate.per_s, 1))
            for name, rate in self._tenant_rates.items()
        }
        for name in [
            name for name, load in loads.items() if not load.running and not load.tokens_per_s
        ]:
            del self._tenant_rates[name], loads[name]
            self._tenant_tokens.pop(name, None)
        busiest = sorted(
            loads, key=lambda name: (-loads[name].tokens_per_s, -loads[name].running, name)
        )
        return {name: loads[name] for name in busiest[:MAX_TENANTS]}

    # ── inside ──

    def _take_out(self, job_id: str) -> JobTimestamps | None:
        if self._frames:
            self._count()
        stamps = self._stamps.pop(job_id, None)
        if stamps is not None:
            self._running.pop(stamps.delivery.request_id, None)
        return stamps

    def _first_token(self, stamps: JobTimestamps, now: int) -> None:
        stamps.first_ns = now
        assert stamps.request is not None
        priority = stamps.request.priority.value
        self._metrics.prefill.of(priority).observe(max(0, now - stamps.started_ns) / 1e9)
        if stamps.delivery.deliveries == 1:
            self.first_token_s.add(max(0.0, now / 1e9 - stamps.delivery.created_ms / 1e3))
            self.queue_s.add(max(0.0, stamps.claimed_ns / 1e9 - stamps.delivery.created_ms / 1e3))

    def _count_steps(self, stats: EngineStats) -> None:
        before, self._stats = self._stats, stats
        steps = stats.steps - before.steps
        if steps < 0:  # a new engine process
            before, steps = EngineStats(), stats.steps
        if steps:
            self._metrics.step_seconds.of().observe((stats.busy_s - before.busy_s) / steps, steps)
            self._metrics.step_tokens.of().observe(
                (stats.computed_tokens - before.computed_tokens) / steps, steps
            )

    def _export(self, stamps: JobTimestamps, item: FinishedJob | None, left: str) -> str | None:
        if item is not None and stamps.first_ns and stamps.request is not None:
            seconds = (stamps.latest_ns - stamps.first_ns) / 1e9
            self._metrics.decode.of(stamps.request.priority.value).observe(max(0.0, seconds))
        if self._tracing is None:
            return None
        result = item.result if item is not None else None
        return self._tracing.export(
            stamps.span(self._queue, self._worker_id, self._clock_ns(), result, left)
        )


def _is_good_line(item: FinishedJob) -> bool:
    return (
        item.request is not None
        and bool(item.request.batch_id)
        and item.result.status is JobStatus.SUCCEEDED
    )


def _fields(item: FinishedJob, trace_id: str | None) -> dict[str, object]:
    """Return the fields of a job's log line: names, outcome, sizes and times. Prompt and text are
    under `private`, which the settings must allow.
    """
    result, usage = item.result, item.result.usage
    fields: dict[str, object] = {
        "job_id": result.job_id,
        "tenant": result.tenant,
        "priority": item.request.priority.value if item.request is not None else "",
        "finish_reason": result.finish_reason.value if result.finish_reason is not None else None,
        "error": result.error.code if result.error is not None else None,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_ms": usage.queue_ms,
        "ttft_ms": usage.ttft_ms,
        "total_ms": usage.total_ms,
        "trace_id": trace_id,
    }
    if item.request is not None:
        asked = item.request.prompt or item.request.messages or item.request.prompt_ids
        fields["private"] = {"prompt": asked, "text": result.text}
    return {name: value for name, value in fields.items() if value not in (None, "")}
