"""Turns a claimed job's bytes into a request for the engine, or into the job's end.

Every delivery gets an outcome. Bytes that are no request, invalid values, prompts that do not fit,
and jobs whose log already holds their end become a finished job. Nothing here raises for input that
a producer can send.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable

import msgspec

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES, DecodeError, decode_request
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobError
from tokenmill_schemas.validation import problems
from tokenmill_worker.consume.outcomes import Outcomes
from tokenmill_worker.consume.served_model import ServedModel
from tokenmill_worker.engine.types import GenerationRequest, Thoughts
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob
from tokenmill_worker.text.chat.reasoning import Opening, ReasoningFormat
from tokenmill_worker.text.chat.templates import TemplateError
from tokenmill_worker.text.job_output import JobOutput
from tokenmill_worker.text.resume import EndRules, LogCorrupt, read_log, replay
from tokenmill_worker.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

INVALID = "invalid_request"
TOO_LONG = "context_length_exceeded"


class _Refused(Exception):
    """Raised to end the job as failed."""

    def __init__(self, message: str, code: str = INVALID) -> None:
        super().__init__(message)
        self.error = JobError(code, message)


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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._reasoning = reasoning
        self._max_payload_bytes = max_payload_bytes
        self._clock = clock
        self._outcomes = Outcomes(worker_id, model.names[0], self._now_ms)

    async def process(self, delivery: Delivery) -> AdmittedJob | FinishedJob:
        """Return the job with its request for the engine, or its end. Never raises."""
        request: JobRequest | None = None
        try:
            request = decode_request(delivery.payload, self._max_payload_bytes)
            if delivery.is_redriven:
                request = msgspec.structs.replace(request, deadline_ms=None)
            if delivery.outcome != "run":
                return self._end(delivery, request)
            return await self._process(delivery, request)
        except DecodeError as error:
            if delivery.outcome != "run":
                return self._end(delivery, None)
            return self._outcomes.failed(delivery, None, JobError(INVALID, f"the {error}"))
        except _Refused as refusal:
            return self._outcomes.failed(delivery, request, refusal.error)
        except Exception as error:  # any error: the other jobs of the claim must still start
            log.exception("job %s fails: its request could not be processed", delivery.job_id)
            message = f"the worker could not take this request in: {type(error).__name__}"
            return self._outcomes.failed(delivery, request, JobError("internal_error", message))

    async def _process(self, delivery: Delivery, request: JobRequest) -> AdmittedJob | FinishedJob:
        self._check(request)
        if self._is_late(request) and not delivery.log:
            return self._outcomes.expired(delivery, request)
        chat = self._render(request)
        opening = self._opening(request, chat)
        prompt_ids = await self._encode(request, chat)
        chunks = self._read(delivery)
        defaults = self._defaults(chunks)
        max_tokens = self._resolve_max_tokens(request, len(prompt_ids), defaults.max_tokens)
        params = _resolved(delivery, request, defaults, max_tokens)
        answer = self._resume(delivery, chunks, params, opening)
        answer.prompt_tokens = len(prompt_ids)
        if not answer.is_finished and self._is_late(request):
            answer.end_all(FinishReason.EXPIRED)
        if answer.is_finished:
            return self._outcomes.complete(delivery, request, answer)
        generation = self._generation(delivery, request, answer, prompt_ids, params)
        thoughts = self._thoughts(request, opening)
        if thoughts is not None:
            generation = msgspec.structs.replace(generation, thoughts=thoughts)
        return AdmittedJob(delivery, request, generation, answer)

    def _generation(
        self,
        delivery: Delivery,
        request: JobRequest,
        answer: JobOutput,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
    ) -> GenerationRequest:
        done = tuple(
            i for i, choice in enumerate(answer.choices) if choice.finish_reason is not None
        )
        resumed = (
            tuple(tuple(choice.stream.token_ids) for choice in answer.choices)
            if answer.num_tokens
            else ()
        )
        return GenerationRequest(
            request_id=delivery.request_id,
            prompt_ids=prompt_ids,
            params=msgspec.structs.replace(  # the engine sees no text
                params, stop=(), lora=self._adapter(request)
            ),
            priority=request.priority.rank,
            tenant=request.tenant,
            cache_salt=request.tenant,
            deadline=None if request.deadline_ms is None else request.deadline_ms / 1000,
            resumed=resumed,
            done=done,
        )

    # ── checks ──

    def _check(self, request: JobRequest) -> None:
        found = problems(request, is_decoded=True)
        if found:
            raise _Refused("; ".join(found))
        self._adapter(request)
        for name, ids in (
            ("prompt_ids", request.prompt_ids or ()),
            ("stop_token_ids", request.params.stop_token_ids),
            ("logit_bias", tuple(request.params.logit_bias)),
        ):
            if max(ids, default=0) >= self._model.vocab_size:
                raise _Refused(
                    f"{name} holds {max(ids)}, "
                    f"outside the vocabulary of {self._model.vocab_size} ids"
                )

    def _adapter(self, request: JobRequest) -> str:
        try:
            return self._model.adapter_for(request.model, request.params.lora)
        except LookupError as error:
            raise _Refused(str(error.args[0]), "model_not_found") from error

    def _render(self, request: JobRequest) -> str | None:
        """Return the chat as the model reads it; None for a prompt."""
        if request.messages is None:
            return None
        try:
            return self._tokenizer.template.render(
                request.messages,
                documents=request.documents,
                continue_final_message=request.continue_final_message,
                add_generation_prompt=request.add_generation_prompt,
                variables=request.chat_template_kwargs,
            )
        except TemplateError as error:
            raise _Refused(str(error)) from error

    def _opening(self, request: JobRequest, chat: str | None) -> Opening | None:
        """Return how the answer begins; None if it has no thoughts that are told apart. What
        follows a prompt is its continuation, so only a chat's answer has thoughts.
        """
        if self._reasoning is not None and chat is not None:
            return self._reasoning.opening(chat)
        if request.params.thinking_budget is not None:
            raise _Refused(
                "thinking_budget needs messages, and a model whose thoughts are told apart"
            )
        return None

    def _thoughts(self, request: JobRequest, opening: Opening | None) -> Thoughts | None:
        """Return what the engine must know of the thoughts, where anything depends on them."""
        params = request.params
        if opening is None or opening.thoughts is None:
            return None
        if params.response_format is None and params.thinking_budget is None:
            return None
        return msgspec.structs.replace(opening.thoughts, budget=params.thinking_budget)

    async def _encode(self, request: JobRequest, chat: str | None) -> tuple[int, ...]:
        if request.prompt_ids is not None:
            prompt_ids = request.prompt_ids
        elif chat is not None:
            self._refuse_absurd_length(chat)
            prompt_ids = await self._tokenizer.encode_rendered(chat)
        else:
            text = request.prompt or ""
            self._refuse_absurd_length(text)
            prompt_ids = await self._tokenizer.encode_prompt(text)
        if not prompt_ids:
            raise _Refused("the prompt is empty: it has no tokens")
        if len(prompt_ids) >= self._model.max_model_len:
            raise _Refused(
                f"the prompt has {len(prompt_ids)} tokens; {self._length_rule}", TOO_LONG
            )
        return prompt_ids

    def _refuse_absurd_length(self, text: str) -> None:
        """Refuse a text that exceeds the limit by its least possible number of tokens. Tokenising
        megabytes would take seconds of a core.
        """
        least = self._tokenizer.least_tokens(text)
        if least >= self._model.max_model_len:
            raise _Refused(f"the prompt has at least {least} tokens; {self._length_rule}", TOO_LONG)

    @property
    def _length_rule(self) -> str:
        length = self._model.max_model_len
        return f"the model's length is {length}, of which the answer needs at least 1"

    def _defaults(self, chunks: list[Chunk]) -> SamplingParams:
        """Return what holds where a request names nothing.

        An answer that has begun keeps the parameters of its first worker, whose model may have
        other defaults. A log without parameters was begun by a worker that knew no such defaults.
        """
        limit = self._model.default_max_tokens
        if chunks:
            return chunks[0].params or SamplingParams(max_tokens=limit)
        defaults = self._model.sampling_defaults
        return defaults if limit is None else msgspec.structs.replace(defaults, max_tokens=limit)

    def _resolve_max_tokens(
        self, request: JobRequest, num_prompt_tokens: int, default: int | None
    ) -> int:
        room = self._model.max_model_len - num_prompt_tokens
        wanted = request.params.max_tokens
        if wanted is None:
            return room if default is None else min(room, max(default, request.params.min_tokens))
        if wanted > room:
            raise _Refused(
                f"{num_prompt_tokens} prompt tokens and max_tokens={wanted} "
                f"make {num_prompt_tokens + wanted}; "
                f"the model's length is {self._model.max_model_len}",
                TOO_LONG,
            )
        return wanted

    def _is_late(self, request: JobRequest) -> bool:
        return request.deadline_ms is not None and request.deadline_ms <= self._now_ms()

    # ── the log ──

    def _read(self, delivery: Delivery) -> list[Chunk]:
        try:
            return read_log(delivery.log, self._model.vocab_size)
        except LogCorrupt as error:
            raise _Refused(str(error), "corrupt_log") from error

    def _resume(
        self,
        delivery: Delivery,
        chunks: list[Chunk],
        params: SamplingParams,
        opening: Opening | None,
    ) -> JobOutput:
        answer = JobOutput.start(self._tokenizer, params, opening)
        answer.queue_ms = max(0, delivery.started_ms - delivery.created_ms)
        try:
            replay(answer, chunks, EndRules.of(params, self._model.eos_token_ids))
        except LogCorrupt as error:
            raise _Refused(str(error), "corrupt_log") from error
        return answer

    def _end(self, delivery: Delivery, request: JobRequest | None) -> FinishedJob:
        """Build the end of a job that the claim script found ended; its answer is what the log
        holds.
        """
        answer = None
        if request is not None and delivery.log and not problems(request):
            with contextlib.suppress(_Refused):  # an unreadable log does not change the outcome
                chunks = self._read(delivery)
                defaults = self._defaults(chunks)
                most = request.params.max_tokens or defaults.max_tokens
                params = _resolved(delivery, request, defaults, most)
                opening = self._opening(request, self._render(request))
                answer = self._resume(delivery, chunks, params, opening)
        return self._outcomes.ended(delivery, request, answer)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _resolved(
    delivery: Delivery, request: JobRequest, defaults: SamplingParams, max_tokens: int | None
) -> SamplingParams:
    """Return the request's parameters with nothing left unnamed."""
    seed = seed_of(delivery.job_id) if request.params.seed is None else request.params.seed
    return msgspec.structs.replace(
        request.params.with_defaults(defaults), seed=seed, max_tokens=max_tokens
    )


def seed_of(job_id: str) -> int:
    """Return the seed of a job that names none. It is the same at every delivery, so that a resumed
    answer continues as it would have.
    """
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "big") >> 1
