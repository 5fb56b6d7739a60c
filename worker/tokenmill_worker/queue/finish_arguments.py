"""Encodes the ends of jobs for the script that acknowledges them."""

from __future__ import annotations

import logging

from tokenmill.transport.scripts import Argument
from tokenmill_schemas.codec import encode
from tokenmill_worker.jobs import FinishedJob, set_aside

log = logging.getLogger(__name__)


def finish_arguments(job: FinishedJob) -> tuple[Argument, ...]:
    try:
        return _encoded_end(job)
    except Exception as error:
        log.exception("Job %s ends without its answer: it cannot be encoded", job.job_id)
        return _encoded_end(set_aside(job, "acknowledge", error))


def _encoded_end(job: FinishedJob) -> tuple[Argument, ...]:
    usage = job.result.usage
    return (
        job.result.job_id,
        job.token,
        job.result.status.value,
        encode(job.result),
        encode(job.final_chunk),
        usage.prompt_tokens + usage.completion_tokens,
    )
