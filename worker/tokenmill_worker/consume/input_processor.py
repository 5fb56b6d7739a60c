"""Turns a claimed job's bytes into a request for the engine, or into the job's end.

Every delivery gets an outcome. Bytes that are no request, invalid values, prompts that do not fit,
and jobs whose log already holds their end become a finished job. Nothing here raises for input that
a producer can send.
"""

from __future__ import annotations

import contextlib
import logging

import msgspec

from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES, DecodeError, decode_request
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobError
from tokenmill_schemas.validation import problems
from tokenmill_worker.consume.log_reader import LogReader
from tokenmill_worker.consume.outcomes import Outcomes
from tokenmill_worker.consume.param_resolver import ParamResolver, seed_of
from tokenmill_worker.consume.prompt_encoder import PromptEncoder
from tokenmill_worker.consume.refusal import INVALID_REQUEST, Refused
from tokenmill_worker.consume.served_model import ServedModel
from tokenmill_worker.engine.types import GenerationRequest
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob
from tokenmill_worker.text.chat.chat_format import ChatFormat
from tokenmill_worker.text.chat.reasoning import ReasoningFormat
from tokenmill_worker.text.chat.tools import ToolFormat
from tokenmill_worker.text.job_output import JobOutput
from tokenmill_worker.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class InputProcessor:
    """Validates and tokenises the jobs of one worker. Several jobs may be processed at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ServedModel,
        *,
        worker_id: str = "",
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        reasoning: ReasoningFormat | None = None,
        tool_format: ToolFormat | None = None,
        clock: ServerClock | None = None,
    ) -> None:
        self._model = model
        chat = ChatFormat(tokenizer, reasoning, tool_format)
        self._prompts = PromptEncoder(tokenizer, model.max_model_len, chat)
        self._params = ParamResolver(model)
        self._log = LogReader(tokenizer, model)
        self._max_payload_bytes = max_payload_bytes
        self._clock = clock or ServerClock()
        self._outcomes = Outcomes(worker_id, model.names[0], self._clock.now_ms)

    async def process(self, delivery: Delivery) -> AdmittedJob | FinishedJob:
        """Return the job with its request for the engine, or its end. Never raises."""
        request: JobRequest | None = None
        try:
            request = decode_request(delivery.payload, self._max_payload_bytes)
            if delivery.is_redriven:
                request = msgspec.structs.replace(request, deadline_ms=None)
            if delivery.outcome != "run":
                return await self._end(delivery, request)
            return await self._process(delivery, request)
        except DecodeError as error:
            if delivery.outcome != "run":
                return await self._end(delivery, None)
            return self._outcomes.failed(delivery, None, JobError(INVALID_REQUEST, f"the {error}"))
        except Refused as refusal:
            return self._outcomes.failed(delivery, request, refusal.error)
        except Exception as error:  # any error: the other jobs of the claim must still start
            log.exception("Job %s fails: its request could not be processed", delivery.job_id)
            message = f"the worker could not take this request in: {type(error).__name__}"
            return self._outcomes.failed(delivery, request, JobError("internal_error", message))

    async def _process(self, delivery: Delivery, request: JobRequest) -> AdmittedJob | FinishedJob:
        self._check(request)
        if self._is_late(request) and not delivery.log:
            return self._outcomes.expired(delivery, request)
        chat, form = self._prompts.render(request)
        prompt_ids = await self._prompts.encode(request, chat)
        given = await self._prompts.encode_continuations(request, chat, prompt_ids)
        chunks = self._log.read(delivery)
        params = self._params.resolve(request, chunks, len(prompt_ids), given)
        answer = self._log.resume(delivery, chunks, params, form, prompt_ids)
        answer.prompt_tokens = len(prompt_ids)
        if not answer.is_finished and self._is_late(request):
            answer.end_all(FinishReason.EXPIRED)
        if answer.is_finished:
            return self._outcomes.complete(delivery, request, answer)
        generation = self._generation(delivery, request, answer, prompt_ids, params)
        generation = msgspec.structs.replace(form.bound(generation), given=given)
        return AdmittedJob(delivery, request, generation, answer)

    def _generation(
        self,
        delivery: Delivery,
        request: JobRequest,
        answer: JobOutput,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
    ) -> GenerationRequest:
        lora = self._model.adapter_for(request.model, request.params.lora)
        seed = seed_of(delivery.job_id) if params.seed is None else params.seed
        resumed = tuple(tuple(choice.stream.token_ids) for choice in answer.choices)
        known = {"prompt_logprobs": None} if answer.prompt is not None else {}  # from the log
        return GenerationRequest(
            request_id=delivery.request_id,
            prompt_ids=prompt_ids,
            params=msgspec.structs.replace(
                params,
                seed=seed,
                stop=(),  # the engine sees no text
                stop_token_ids=self._model.stop_token_ids(params),
                lora=lora,
                **known,
            ),
            priority=request.priority.rank,
            tenant=request.tenant,
            cache_salt=request.tenant,
            deadline=None
            if request.deadline_ms is None
            else self._clock.monotonic_s(request.deadline_ms),
            resumed=resumed if answer.num_tokens else (),
            done=answer.ended_choices,
        )

    def _check(self, request: JobRequest) -> None:
        found = problems(request, is_decoded=True)
        if found:
            raise Refused("; ".join(found))
        self._model.adapter_for(request.model, request.params.lora)
        self._model.check_ids(request)

    def _is_late(self, request: JobRequest) -> bool:
        return request.deadline_ms is not None and request.deadline_ms <= self._clock.now_ms()

    async def _end(self, delivery: Delivery, request: JobRequest | None) -> FinishedJob:
        """Build the end of a job that the claim script found ended; its answer is what the log
        holds.
        """
        answer = None
        if request is not None and delivery.log and not problems(request):
            with contextlib.suppress(Refused):  # an unreadable log does not change the outcome
                chunks = self._log.read(delivery)
                params = self._params.resolve_logged(request, chunks)
                chat, form = self._prompts.render(request)
                prompt_ids = await self._prompts.encode(request, chat) if params.echo else ()
                answer = self._log.resume(delivery, chunks, params, form, prompt_ids)
        return self._outcomes.ended(delivery, request, answer)
