"""Builds the engine's request for a job: tokens, complete parameters, and the answer so far."""

from __future__ import annotations

import msgspec

from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.contract.prompt import Prompt
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.input.param_resolver import seed_of
from tokenmill_worker.input.served_model import ServedModel
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.text.job_output import JobOutput


def engine_request(
    model: ServedModel,
    clock: ServerClock,
    delivery: Delivery,
    request: JobRequest,
    answer: JobOutput,
    prompt: Prompt,
    params: SamplingParams,
) -> GenerationRequest:
    """Return the request of one delivery. Raises Refused for an adapter that is not served.

    Args:
        answer: what the log of earlier attempts holds.
        params: with nothing left unnamed but the seed.
    """
    lora = model.adapter_for(request.model, request.params.lora)
    seed = seed_of(delivery.job_id) if params.seed is None else params.seed
    resumed = tuple(tuple(choice.stream.token_ids) for choice in answer.choices)
    known = {"prompt_logprobs": None} if answer.prompt is not None else {}  # from the log
    return GenerationRequest(
        request_id=delivery.request_id,
        prompt=prompt,
        params=msgspec.structs.replace(
            params,
            seed=seed,
            stop=(),  # the engine sees no text
            stop_token_ids=model.stop_token_ids(params),
            lora=lora,
            **known,
        ),
        priority=request.priority.rank,
        tenant=request.tenant,
        cache_salt=request.tenant,
        deadline=None if request.deadline_ms is None else clock.monotonic_s(request.deadline_ms),
        resumed=resumed if answer.num_tokens else (),
        done=answer.ended_choices,
    )
