"""Turns a claimed job's bytes into a request for the engine, or into the job's end.

Every delivery gets an outcome. Bytes that are no request, invalid values, prompts that do not fit,
and jobs whose log already holds their end become a finished job. Nothing here raises for input that
a producer can send. Admission uses neither Redis nor SQL, and of the engine only the request type.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES, DecodeError, decode_request
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobError, JobStatus
from tokenmill_schemas.validation import MAX_NAME_CHARS, metadata_problems, problems
from tokenmill_worker.engine.types import GenerationRequest
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob
from tokenmill_worker.text.job_output import JobOutput
from tokenmill_worker.text.resume import EndRules, LogCorrupt, read_log, replay
from tokenmill_worker.text.tokenizer import TemplateError, Tokenizer

log = logging.getLogger(__name__)

INVALID = "invalid_request"
TOO_LONG = "context_length_exceeded"
MAX_LISTED = 10  # names that an error message lists


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, as far as admission needs it.

    `names` are the names that a request may use for the model; the first is the model's own.
    `default_max_tokens` limits the answers of requests that set no limit; with None, such an answer
    may take the rest of the model's length. A request selects one of `adapters` by `lora`, or as
    its model. `aliases` are further names for the adapters and the model.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_max_tokens: int | None = None
    adapters: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def adapter_for(self, model: str, lora: str) -> str:
        """Return the name of the adapter that answers; empty for the model itself. Raises
        LookupError, with one sentence, for names that are not served or contradict each other.
        """
        target = self.aliases.get(model, model)
        if target and target not in self.names and target not in self.adapters:
            others = sorted({*self.adapters, *self.aliases})
            also = (
                f" (and as adapters or aliases: {', '.join(others[:MAX_LISTED])})" if others else ""
            )
            raise LookupError(
                f"model {model!r} is not served here; this queue serves {self.names[0]!r}{also}"
            )
        chosen = target if target in self.adapters else ""
        wanted = self.aliases.get(lora, lora)
        if wanted and wanted not in self.adapters:
            there = ", ".join(sorted(self.adapters)[:MAX_LISTED]) or "none"
            raise LookupError(f"lora {lora!r} is not served here; this queue's adapters: {there}")
        if chosen and wanted and chosen != wanted:
            raise LookupError(
                f"model {model!r} is the adapter {chosen!r}, but lora asks for {wanted!r}"
            )
        return chosen or wanted


class _Refused(Exception):
    """Raised to end the job as failed."""

    def __init__(self, message: str, code: str = INVALID) -> None:
        super().__init__(message)
        self.error = JobError(code, message)


class InputProcessor:
    """Validates and tokenises the jobs of one worker. `admit` may run for several jobs at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ServedModel,
        *,
        worker_id: str = "",
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._worker_id = worker_id
        self._max_payload_bytes = max_payload_bytes
        self._clock = clock

    async def process(self, delivery: Delivery) -> AdmittedJob | FinishedJob:
        request: JobRequest | None = None
        try:
            request = decode_request(delivery.payload, self._max_payload_bytes)
            if delivery.is_redriven:
                request = msgspec.structs.replace(request, deadline_ms=None)
            if delivery.outcome != "run":
                return self._ended(delivery, request)
            return await self._process(delivery, request)
        except DecodeError as error:
            if delivery.outcome != "run":
                return self._ended(delivery, None)
            return self._failed(delivery, None, JobError(INVALID, f"the {error}"))
        except _Refused as refusal:
            return self._failed(delivery, request, refusal.error)
        except Exception as error:  # any error: the other jobs of the claim must still start
            log.exception("job %s cannot be admitted", delivery.job_id)
            message = f"the worker could not take this request in: {type(error).__name__}"
            return self._failed(delivery, request, JobError("internal_error", message))

    async def _process(self, delivery: Delivery, request: JobRequest) -> AdmittedJob | FinishedJob:
        self._check(request)
        if self._is_late(request) and not delivery.log:
            return self._conclude(delivery, JobStatus.EXPIRED, request)
        prompt_ids = await self._encode(request)
        max_tokens = self._resolve_max_tokens(request, len(prompt_ids))
        answer = self._answer_so_far(delivery, request, max_tokens)
        answer.prompt_tokens = len(prompt_ids)
        if not answer.is_finished and self._is_late(request):
            answer.end_all(FinishReason.EXPIRED)
        if answer.is_finished:
            return self._complete(delivery, request, answer)
        generation = self._generation(delivery, request, answer, prompt_ids, max_tokens)
        return AdmittedJob(delivery, request, generation, answer)

    def _generation(
        self,
        delivery: Delivery,
        request: JobRequest,
        answer: JobOutput,
        prompt_ids: tuple[int, ...],
        max_tokens: int,
    ) -> GenerationRequest:
        params = request.params
        seed = seed_of(delivery.job_id) if params.seed is None else params.seed
        adapter = self._adapter(request)
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
                params, seed=seed, max_tokens=max_tokens, stop=(), lora=adapter
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
                    f"{name} holds {max(ids)}, outside the vocabulary of {self._model.vocab_size} ids"
                )

    def _adapter(self, request: JobRequest) -> str:
        try:
            return self._model.adapter_for(request.model, request.params.lora)
        except LookupError as error:
            raise _Refused(str(error.args[0]), "model_not_found") from error

    async def _encode(self, request: JobRequest) -> tuple[int, ...]:
        if request.prompt_ids is not None:
            prompt_ids = request.prompt_ids
        elif request.messages is not None:
            try:
                chat = self._tokenizer.render_chat(request.messages)
            except TemplateError as error:
                raise _Refused(str(error)) from error
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
        return f"the model's length is {self._model.max_model_len}, of which the answer needs at least 1"

    def _resolve_max_tokens(self, request: JobRequest, num_prompt_tokens: int) -> int:
        room = self._model.max_model_len - num_prompt_tokens
        wanted = request.params.max_tokens
        if wanted is None:
            default = self._model.default_max_tokens
            return room if default is None else min(room, max(default, request.params.min_tokens))
        if wanted > room:
            raise _Refused(
                f"{num_prompt_tokens} prompt tokens and max_tokens={wanted} make {num_prompt_tokens + wanted}; "
                f"the model's length is {self._model.max_model_len}",
                TOO_LONG,
            )
        return wanted

    def _is_late(self, request: JobRequest) -> bool:
        return request.deadline_ms is not None and request.deadline_ms <= self._now_ms()

    # ── the log ──

    def _answer_so_far(self, delivery: Delivery, request: JobRequest, max_tokens: int) -> JobOutput:
        answer = JobOutput.start(self._tokenizer, request.params)
        answer.queue_ms = max(0, delivery.started_ms - delivery.created_ms)
        rules = EndRules.of(request.params, max_tokens, self._model.eos_token_ids)
        try:
            replay(answer, read_log(delivery.log, self._model.vocab_size), rules)
        except LogCorrupt as error:
            raise _Refused(str(error), "corrupt_log") from error
        return answer

    # ── ends ──

    def _ended(self, delivery: Delivery, request: JobRequest | None) -> FinishedJob:
        """Build the end of a job that the claim script found ended; its answer is what the log
        holds. A job with the verdict "dead" whose logged answer is complete ends with that answer.
        """
        status, reason, error = _verdict(delivery)
        answer = None
        if request is not None and delivery.log and not problems(request):
            try:
                answer = self._answer_so_far(
                    delivery, request, request.params.max_tokens or self._model.max_model_len
                )
            except _Refused:  # a log that cannot be read does not change the verdict
                answer = None
        if request is not None and answer is not None:
            answer.prompt_tokens = _logged_prompt_tokens(delivery)
            if (
                delivery.outcome == "dead" and answer.is_finished
            ):  # complete: no engine has to run it
                return self._complete(delivery, request, answer)
            answer.end_all(reason)
        return self._conclude(delivery, status, request, answer, error)

    def _complete(self, delivery: Delivery, request: JobRequest, answer: JobOutput) -> FinishedJob:
        error = None
        if (
            answer.status is JobStatus.FAILED
        ):  # logged by an attempt that ended before it could record it
            error = JobError("engine_error", "the engine failed in an earlier attempt")
        return self._conclude(delivery, answer.status, request, answer, error)

    def _failed(
        self, delivery: Delivery, request: JobRequest | None, error: JobError
    ) -> FinishedJob:
        return self._conclude(delivery, JobStatus.FAILED, request, error=error)

    def _conclude(
        self,
        delivery: Delivery,
        status: JobStatus,
        request: JobRequest | None,
        answer: JobOutput | None = None,
        error: JobError | None = None,
    ) -> FinishedJob:
        return FinishedJob.build(
            delivery,
            status,
            worker_id=self._worker_id,
            now_ms=self._now_ms(),
            request=None if request is None else recordable(request),
            answer=answer,
            error=error,
            model=self._model.names[0],
        )

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def seed_of(job_id: str) -> int:
    """Return the seed of a job that names none. It is the same at every delivery, so that a resumed
    answer continues as it would have.
    """
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "big") >> 1


def _verdict(delivery: Delivery) -> tuple[JobStatus, FinishReason, JobError | None]:
    if delivery.outcome == "cancelled":
        return JobStatus.CANCELLED, FinishReason.CANCELLED, None
    if delivery.outcome == "expired":
        return JobStatus.EXPIRED, FinishReason.EXPIRED, None
    message = (
        f"set aside after {delivery.crashes} engine crashes and {delivery.deliveries} deliveries"
    )
    return JobStatus.DEAD, FinishReason.ERROR, JobError("dead", message)


def recordable(request: JobRequest) -> JobRequest:
    """Return the request as a result may hold it. Names and metadata of a refused request need not
    fit the columns, so they are shortened or dropped.
    """
    if not problems(request):
        return request
    metadata = {} if metadata_problems(request.metadata) else request.metadata
    return msgspec.structs.replace(
        request,
        model=_printable(request.model),
        tenant=_printable(request.tenant),
        metadata=metadata,
    )


def _printable(name: str) -> str:
    return "".join(letter for letter in name[:MAX_NAME_CHARS] if letter.isprintable())


def _logged_prompt_tokens(delivery: Delivery) -> int:
    """Return the number of prompt tokens in the log's first chunk; 0 if it names none."""
    usage = read_log(delivery.log[:1])[0].usage
    return usage.prompt_tokens if usage is not None else 0
