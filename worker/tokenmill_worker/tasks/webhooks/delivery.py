"""Delivers a webhook message: the event in JSON, its signature, the POST, and the retry after a
failure.

Delivery is at least once: a process that dies after the receiver's answer and before recording it
sends the message again, with the same id. Nothing is ever sent unsigned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from tokenmill.transport.backoff import Backoff
from tokenmill.webhooks import sign, tenant_secret
from tokenmill_schemas.codec import DecodeError, decode_result
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import ChoiceResult, JobError, JobStatus, Usage
from tokenmill_schemas.webhook import (
    ApiEvent,
    ApiEventData,
    WebhookChoice,
    WebhookEvent,
    WebhookJob,
)
from tokenmill_worker.tasks.webhooks.addresses import AddressRefused, AddressUnknown
from tokenmill_worker.tasks.webhooks.http_sender import Reply, Sender, SendFailed
from tokenmill_worker.tasks.webhooks.outbox import Attempt, Outbox, OutboxLease

log = logging.getLogger(__name__)

MAX_TEXT_BYTES: Final = 256 * 1024  # total of all answers; the receiver must fetch longer ones
RETRY_BACKOFF: Final = Backoff(first_s=5.0, longest_s=6 * 3600.0, factor=4.0, spread=(0.75, 1.25))


class WebhookDelivery:
    """Delivers the messages of the outbox. `clock` gives Unix seconds."""

    def __init__(
        self,
        outbox: Outbox,
        sender: Sender,
        secret: str,
        backoff: Backoff = RETRY_BACKOFF,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._outbox = outbox
        self._sender = sender
        self._secret = secret
        self._backoff = backoff
        self._clock = clock

    def claim(self) -> list[OutboxLease]:
        """Claim due messages. Returns none without a secret; the messages wait."""
        if not self._secret:
            waiting = self._outbox.counts()["pending"]
            if waiting:
                log.error(
                    "%d webhooks wait until TOKENMILL_WEBHOOK_SECRET is set: none is sent unsigned",
                    waiting,
                )
            return []
        return self._outbox.claim(self._now_ms())

    def deliver(self, lease: OutboxLease) -> str:
        """Deliver a message. Returns "delivered", "failed", or "skipped" if the lease has passed to
        another process or the job has ended again.
        """
        attempt = self._outbox.begin(lease, self._now_ms())
        if attempt is None:
            return "skipped"
        try:
            reply = self._send(attempt)
        except AddressRefused as error:
            return self._failed(attempt, str(error), None, is_final=True)
        except (SendFailed, AddressUnknown) as error:
            return self._failed(attempt, str(error), None)
        if reply.is_success:
            self._outbox.delivered(attempt, reply.status, self._now_ms())
            return "delivered"
        words = f"the receiver answered {reply.status}"
        if 300 <= reply.status < 400:
            words += "; redirects are not followed"
        return self._failed(attempt, words, reply, is_final=reply.is_final)

    def _send(self, attempt: Attempt) -> Reply:
        body = msgspec.json.encode(body_of(attempt))
        sent_at = int(self._clock())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "tokenmill",
            "webhook-id": attempt.id,
            "webhook-timestamp": str(sent_at),
            "webhook-signature": sign(
                attempt.id, sent_at, body, tenant_secret(self._secret, attempt.message["tenant"])
            ),
        }
        return self._sender.post(attempt.message["url"], body, headers)

    def _failed(
        self, attempt: Attempt, error: str, reply: Reply | None, *, is_final: bool = False
    ) -> str:
        asked_s = reply.retry_after_s if reply else None
        delay_s = self._backoff.delay_s(attempt.number, asked_s or 0.0)
        due_ms = None if is_final else self._now_ms() + round(delay_s * 1000)
        log.warning("Webhook %s was not delivered at try %d: %s", attempt.id, attempt.number, error)
        self._outbox.failed(attempt, error, reply.status if reply else None, due_ms)
        return "failed"

    def _now_ms(self) -> int:
        return round(self._clock() * 1000)


def body_of(attempt: Attempt) -> WebhookEvent | ApiEvent:
    """Build the body: our own about a job, OpenAI's about a response or a batch of the gateway."""
    message = attempt.message
    kind, _, _ = message["event"].partition(".")
    if kind == "job":
        return event_of(attempt)
    about = message["job_id"]
    return ApiEvent(
        id=f"evt_{attempt.id.removeprefix('msg_')}",
        created_at=message["ended_ms"] // 1000,
        type=message["event"],
        data=ApiEventData(f"resp_{about}" if kind == "response" else about),
    )


def event_of(attempt: Attempt) -> WebhookEvent:
    """Build the event. It is the same at every try, unless retention removed rows in between."""
    message, job = attempt.message, attempt.job or {}
    moment = datetime.fromtimestamp(message["ended_ms"] / 1000, UTC)
    data = WebhookJob(
        job_id=message["job_id"],
        status=JobStatus(str(message["event"]).removeprefix("job.")),
        queue=message["queue"],
        model=job.get("model", ""),
        tenant=message["tenant"],
        choices=_choices(job),
        usage=_usage(attempt.usage),
        error=JobError(job["error_code"], job["error_message"] or "")
        if job.get("error_code")
        else None,
        attempt=job.get("attempts", 0),
        created_ms=job.get("created_ms", 0),
        started_ms=job.get("started_ms", 0),
        finished_ms=message["ended_ms"],
        metadata=dict(job.get("metadata") or {}),
    )
    return WebhookEvent(
        type=message["event"], timestamp=moment.isoformat().replace("+00:00", "Z"), data=data
    )


def _choices(job: Mapping[str, Any]) -> tuple[WebhookChoice, ...] | None:
    if job.get("result") is None:
        return None
    try:
        choices = decode_result(bytes(job["result"])).choices
    except DecodeError:  # written by a newer version: use the first choice from the columns
        reason = FinishReason(job["finish_reason"]) if job["finish_reason"] else None
        return (WebhookChoice(index=0, text=job["text"] or "", finish_reason=reason),)
    if sum(map(_num_bytes, choices)) > MAX_TEXT_BYTES:
        return None
    return tuple(
        WebhookChoice(
            index=one.index,
            text=one.text,
            finish_reason=one.finish_reason,
            reasoning=one.reasoning or msgspec.UNSET,
            tool_calls=one.tool_calls or msgspec.UNSET,
        )
        for one in choices
    )


def _num_bytes(choice: ChoiceResult) -> int:
    """Return the size of the choice's text, thoughts and calls."""
    calls = "".join(call.name + call.arguments for call in choice.tool_calls)
    return len((choice.text + choice.reasoning + calls).encode())


def _usage(row: Mapping[str, Any] | None) -> Usage | None:
    return (
        Usage(**{name: row[name] for name in Usage.__struct_fields__}) if row is not None else None
    )
