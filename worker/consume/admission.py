"""From a claimed job's bytes to a request that the engine can run, or to the job's end.

Whatever arrives is answered: bytes that are no request, values that cannot be meant, prompts that do not
fit, jobs whose log already holds their end. Nothing here raises for what a producer can send. It knows
no Redis, no SQL, and the engine only as a request to fill in.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from schemas.codec import MAX_PAYLOAD_BYTES, DecodeError, decode_request
from schemas.generation import FinishReason
from schemas.job import JobRequest
from schemas.result import JobError, JobStatus
from schemas.validation import MAX_NAME_CHARS, metadata_problems, problems
from worker.engine.types import GenerationRequest
from worker.jobs import Admitted, Delivery, Finished
from worker.outcome import conclude
from worker.text.answer import Answer
from worker.text.replay import EndRules, LogCorrupt, read_log, replay
from worker.text.tokenizer import TemplateError, Tokenizer

log = logging.getLogger(__name__)

INVALID = "invalid_request"
TOO_LONG = "context_length_exceeded"
MAX_LISTED = 10  # names in a sentence


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What admission must know of the model. `names` are those a request may call it by, the first is its own.

    `default_max_tokens` limits answers of requests that name no limit; None: the rest of the model's length.
    `adapters` may be asked for by `lora`, or as the model; `aliases` are further names for these and for the model.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_max_tokens: int | None = None
    adapters: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def adapter_for(self, model: str, lora: str) -> str:
        """The adapter that answers; empty: the model itself. Raises LookupError with one sentence."""
        target = self.aliases.get(model, model)
        if target and target not in self.names and target not in self.adapters:
            others = sorted({*self.adapters, *self.aliases})
            also = f" (and as adapters or aliases: {', '.join(others[:MAX_LISTED])})" if others else ""
            raise LookupError(f"model {model!r} is not served here; this queue serves {self.names[0]!r}{also}")
        chosen = target if target in self.adapters else ""
        wanted = self.aliases.get(lora, lora)
        if wanted and wanted not in self.adapters:
            there = ", ".join(sorted(self.adapters)[:MAX_LISTED]) or "none"
            raise LookupError(f"lora {lora!r} is not served here; this queue's adapters: {there}")
        if chosen and wanted and chosen != wanted:
            raise LookupError(f"model {model!r} is the adapter {chosen!r}, but lora asks for {wanted!r}")
        return chosen or wanted


class _Refused(Exception):
    """The job ends here, as failed."""

    def __init__(self, message: str, code: str = INVALID) -> None:
        super().__init__(message)
        self.error = JobError(code, message)


class Admission:
    """One per worker; `admit` may run for several jobs at once."""

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

    async def admit(self, delivery: Delivery) -> Admitted | Finished:
        request: JobRequest | None = None
        try:
            request = decode_request(delivery.payload, self._max_payload_bytes)
            if delivery.is_redriven:
                request = msgspec.structs.replace(request, deadline_ms=None)
            if delivery.verdict != "run":
                return self._ended(delivery, request)
            return await self._admit(delivery, request)
        except DecodeError as error:
            if delivery.verdict != "run":
                return self._ended(delivery, None)
            return self._failed(delivery, None, JobError(INVALID, f"the {error}"))
        except _Refused as refusal:
            return self._failed(delivery, request, refusal.error)
        except Exception as error:  # whatever it is, it must not keep the jobs beside it from starting
            log.exception("job %s cannot be admitted", delivery.job_id)
            message = f"the worker could not take this request in: {type(error).__name__}"
            return self._failed(delivery, request, JobError("internal_error", message))

    async def _admit(self, delivery: Delivery, request: JobRequest) -> Admitted | Finished:
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
        return Admitted(delivery, request, generation, answer)

    def _generation(
        self, delivery: Delivery, request: JobRequest, answer: Answer, prompt_ids: tuple[int, ...], max_tokens: int
    ) -> GenerationRequest:
        params = request.params
        seed = seed_of(delivery.job_id) if params.seed is None else params.seed
        adapter = self._adapter(request)
        done = tuple(i for i, choice in enumerate(answer.choices) if choice.finish_reason is not None)
        resumed = tuple(tuple(choice.stream.token_ids) for choice in answer.choices) if answer.num_tokens else ()
        return GenerationRequest(
            request_id=delivery.request_id,
            prompt_ids=prompt_ids,
            params=msgspec.structs.replace(  # text is not its business
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
                raise _Refused(f"{name} holds {max(ids)}, outside the vocabulary of {self._model.vocab_size} ids")

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
            raise _Refused(f"the prompt has {len(prompt_ids)} tokens; {self._length_rule}", TOO_LONG)
        return prompt_ids

    def _refuse_absurd_length(self, text: str) -> None:
        """Tokenising megabytes takes seconds of a core; what can be told without is told without."""
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

    def _answer_so_far(self, delivery: Delivery, request: JobRequest, max_tokens: int) -> Answer:
        answer = Answer.start(self._tokenizer, request.params)
        answer.queue_ms = max(0, delivery.started_ms - delivery.created_ms)
        rules = EndRules.of(request.params, max_tokens, self._model.eos_token_ids)
        try:
            replay(answer, read_log(delivery.log, self._model.vocab_size), rules)
        except LogCorrupt as error:
            raise _Refused(str(error), "corrupt_log") from error
        return answer

    # ── ends ──

    def _ended(self, delivery: Delivery, request: JobRequest | None) -> Finished:
        """The queue found the job at its end: its answer is what was logged. A complete one is not set aside."""
        status, reason, error = _verdict(delivery)
        answer = None
        if request is not None and delivery.log and not problems(request):
            try:
                answer = self._answer_so_far(delivery, request, request.params.max_tokens or self._model.max_model_len)
            except _Refused:  # a log that cannot be read does not change the verdict
                answer = None
        if request is not None and answer is not None:
            answer.prompt_tokens = _logged_prompt_tokens(delivery)
            if delivery.verdict == "dead" and answer.is_finished:  # it needs no engine, and none died of it
                return self._complete(delivery, request, answer)
            answer.end_all(reason)
        return self._conclude(delivery, status, request, answer, error)

    def _complete(self, delivery: Delivery, request: JobRequest, answer: Answer) -> Finished:
        error = None
        if answer.status is JobStatus.FAILED:  # logged by an attempt that ended before it could record it
            error = JobError("engine_error", "the engine failed in an earlier attempt")
        return self._conclude(delivery, answer.status, request, answer, error)

    def _failed(self, delivery: Delivery, request: JobRequest | None, error: JobError) -> Finished:
        return self._conclude(delivery, JobStatus.FAILED, request, error=error)

    def _conclude(
        self,
        delivery: Delivery,
        status: JobStatus,
        request: JobRequest | None,
        answer: Answer | None = None,
        error: JobError | None = None,
    ) -> Finished:
        return conclude(
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
    """For jobs that name none: the same at every delivery, so that a continued answer goes on as it would have."""
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "big") >> 1


def _verdict(delivery: Delivery) -> tuple[JobStatus, FinishReason, JobError | None]:
    if delivery.verdict == "cancelled":
        return JobStatus.CANCELLED, FinishReason.CANCELLED, None
    if delivery.verdict == "expired":
        return JobStatus.EXPIRED, FinishReason.EXPIRED, None
    message = f"set aside after {delivery.crashes} engine crashes and {delivery.deliveries} deliveries"
    return JobStatus.DEAD, FinishReason.ERROR, JobError("dead", message)


def recordable(request: JobRequest) -> JobRequest:
    """As it may stand in a result: names and metadata of a refused request need not fit any column."""
    if not problems(request):
        return request
    metadata = {} if metadata_problems(request.metadata) else request.metadata
    return msgspec.structs.replace(
        request, model=_printable(request.model), tenant=_printable(request.tenant), metadata=metadata
    )


def _printable(name: str) -> str:
    return "".join(letter for letter in name[:MAX_NAME_CHARS] if letter.isprintable())


def _logged_prompt_tokens(delivery: Delivery) -> int:
    """The first chunk tells how many prompt tokens were computed for the job."""
    usage = read_log(delivery.log[:1])[0].usage
    return usage.prompt_tokens if usage is not None else 0
