"""Messages of ops/guides/protocol.md as bytes: one small, real example of each, with its JSON.

The bytes are what our own encoder writes. A test reads them from the page with another library.
"""

import json
from typing import Any

import msgspec

from tokenmill.operations.submit import estimated_tokens, fingerprint
from tokenmill_schemas.chat import Message
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import encode
from tokenmill_schemas.control import Cancel, WorkerStatus
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_schemas.job import JobRequest, Priority
from tokenmill_schemas.result import ChoiceResult, JobError, JobResult, JobStatus, Usage

JOB_ID = "01890a5d-ac96-774b-bcce-b302099a8057"
CREATED_MS = 1_700_000_000_000
_USAGE = Usage(prompt_tokens=12, completion_tokens=2, queue_ms=3, ttft_ms=41, total_ms=65)
REQUEST = JobRequest(
    job_id=JOB_ID,
    messages=(Message("user", "Say hé"),),
    params=SamplingParams(max_tokens=8, temperature=0.0, stop=("\n",)),
    priority=Priority.INTERACTIVE,
    tenant="acme",
    created_ms=CREATED_MS,
)
EXAMPLES: dict[str, Any] = {
    "JobRequest": REQUEST,
    "Chunk": Chunk(job_id=JOB_ID, index=0, token_ids=(72,), text="h"),
    "last Chunk": Chunk(
        job_id=JOB_ID,
        index=2,
        finish_reason=FinishReason.STOP,
        status=JobStatus.SUCCEEDED,
        usage=_USAGE,
    ),
    "refused Chunk": Chunk(
        job_id=JOB_ID,
        index=0,
        status=JobStatus.FAILED,
        error=JobError("invalid_request", "prompt is empty"),
    ),
    "JobResult": JobResult(
        job_id=JOB_ID,
        status=JobStatus.SUCCEEDED,
        model="smollm2-135m-instruct",
        choices=(
            ChoiceResult(
                text="hé", token_ids=(72, 380), text_ends=(1, 2), finish_reason=FinishReason.STOP
            ),
        ),
        usage=_USAGE,
        worker_id="gpu-7",
        created_ms=CREATED_MS,
        started_ms=CREATED_MS + 3,
        finished_ms=CREATED_MS + 65,
    ),
    "Cancel": Cancel(JOB_ID),
    "WorkerStatus": WorkerStatus(worker_id="gpu-7", model="smollm2-135m-instruct", running=1),
}  # fmt: skip


def block(name: str) -> str:
    """Return the example as the guide shows it."""
    packed = encode(EXAMPLES[name])
    lines = [packed[start : start + 24].hex(" ") for start in range(0, len(packed), 24)]
    shown_json = json.dumps(_as_sent(EXAMPLES[name]), ensure_ascii=False)
    extra = f"\nIts fingerprint is `{fingerprint(REQUEST)}`, its cost {estimated_tokens(REQUEST)}."
    return (
        "```\n"
        + "\n".join(lines)
        + "\n```\n```json\n"
        + shown_json
        + "\n```"
        + (extra if name == "JobRequest" else "")
    )


def _as_sent(value: Any) -> Any:
    """Return the value with only the fields that are in its bytes."""
    return msgspec.msgpack.decode(encode(value))
