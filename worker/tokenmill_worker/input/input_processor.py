"""Turns a claimed job's bytes into a request for the engine, or into the job's end.

Every delivery gets an outcome. Bytes that are no request, invalid values, prompts that do not fit,
and jobs whose log already holds their end become a finished job. The log of earlier attempts gives
the answer so far. Nothing here raises for input that a producer can send.
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
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.input.log_reader import LogReader
from tokenmill_worker.input.outcomes import TOO_LONG, Outcomes, Refused
from tokenmill_worker.input.served_model import ParamResolver, ServedModel, seed_of
from tokenmill_worker.jobs import INTERNAL_ERROR, AdmittedJob, Delivery, FinishedJob
from tokenmill_worker.text.chat.chat_format import AnswerForm, ChatFormat
from tokenmill_worker.text.chat.reasoning import ReasoningFormat
from tokenmill_worker.text.chat.templates import TemplateError
from tokenmill_worker.text.chat.tools import ToolFormat
from tokenmill_worker.text.job_output import JobOutput
from tokenmill_worker.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class InputProcessor:
    """Validates and tokenises the jobs of one worker. Several threads may process one job each."""

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
        self.model = model
        chat = ChatFormat(tokenizer, reasoning, tool_format)
        self._prompts = PromptEncoder(tokenizer, model.max_model_len, chat)
        self._params = ParamResolver(model)
        self._log = LogReader(tokenizer, model)
        self._max_payload_bytes = max_payload_bytes
        self._clock = clock or ServerClock()
        self._outcomes = Outcomes(worker_id, model.names[0], self._clock.now_ms)

    def process(self, delivery: Delivery) -> AdmittedJob | FinishedJob:
        """Return the job with its request for the engine, or its end. Never raises. May take
        seconds, and may be called from any thread.
        """
        request: JobRequest | None = None
        try:
            request = self._decode(delivery)
            if request is None or delivery.outcome != "run":
                return self._end(delivery, request)
            return self._process(delivery, request)
        except Refused as refusal:
            error = refusal.error
        except BaseException as caught:  # of any kind, also a panic of native code: only this job
            log.exception("Job %s fails: its request could not be processed", delivery.job_id)
            words = f"the worker could not take this request in: {type(caught).__name__}"
            error = JobError(INTERNAL_ERROR, words)
        return self.failed(delivery, request, error)

    def failed(
        self, delivery: Delivery, request: JobRequest | None, error: JobError
    ) -> FinishedJob:
        """Return the end of a job that cannot run. Never raises."""
        try:
            return self._outcomes.failed(delivery, request, error)
        except Exception:
            log.exception("Job %s ends without its request: it is unreadable", delivery.job_id)
            return self._outcomes.failed(delivery, None, error)

    def cancelled(self, job: AdmittedJob) -> FinishedJob:
        """Return the end of a job that was cancelled before it entered the engine."""
        job.answer.end_all(FinishReason.CANCELLED)
        return self._outcomes.complete(job.delivery, job.request, job.answer)

    def _decode(self, delivery: Delivery) -> JobRequest | None:
        """Return the request; None for bytes that are none, of a job that has ended."""
        try:
            request = decode_request(delivery.payload, self._max_payload_bytes)
        except DecodeError as error:
            if delivery.outcome != "run":
                return None
            raise Refused(f"the {error}") from error
        if delivery.is_redriven:
            return msgspec.structs.replace(request, deadline_ms=None)
        return request

    def _process(self, delivery: Delivery, request: JobRequest) -> AdmittedJob | FinishedJob:
        self._check(request)
        if self._is_late(request) and not delivery.log:
            return self._outcomes.expired(delivery, request)
        chat, form = self._prompts.render(request)
        prompt = self._prompts.encode(request, chat)
        given = self._prompts.encode_continuations(request, chat, prompt)
        chunks = self._log.read(delivery)
        params = self._params.resolve(request, chunks, len(prompt), given)
        answer = self._log.resume(delivery, chunks, params, form, prompt)
        answer.prompt_tokens = len(prompt)
        if not answer.is_finished and self._is_late(request):
            answer.end_all(FinishReason.EXPIRED)
        if answer.is_finished:
            return self._outcomes.complete(delivery, request, answer)
        generation = self._engine_request(delivery, request, answer, prompt, params)
        generation = msgspec.structs.replace(form.bound(generation), given=given)
        return AdmittedJob(delivery, request, generation, answer)

    def _check(self, request: JobRequest) -> None:
        found = problems(request, is_decoded=True)
        if found:
            raise Refused("; ".join(found))
        self.model.adapter_for(request.model, request.params.lora)
        self.model.check_capabilities(request)
        self.model.check_ids(request)

    def _is_late(self, request: JobRequest) -> bool:
        return request.deadline_ms is not None and request.deadline_ms <= self._clock.now_ms()

    def _end(self, delivery: Delivery, request: JobRequest | None) -> FinishedJob:
        """Build the end of a job that the claim script found ended; its answer is what the log
        holds.
        """
        answer = None
        if request is not None and delivery.log and not problems(request):
            with contextlib.suppress(Refused):  # an unreadable log does not change the outcome
                chunks = self._log.read(delivery)
                params = self._params.resolve_logged(request, chunks)
                chat, form = self._prompts.render(request)
                prompt = self._prompts.encode(request, chat) if params.echo else Prompt(())
                answer = self._log.resume(delivery, chunks, params, form, prompt)
                first = chunks[0].usage
                answer.prompt_tokens = 0 if first is None else first.prompt_tokens
        return self._outcomes.ended(delivery, request, answer)

    def _engine_request(
        self,
        delivery: Delivery,
        request: JobRequest,
        answer: JobOutput,
        prompt: Prompt,
        params: SamplingParams,
    ) -> GenerationRequest:
        """Return the request of one delivery, whose seed and stop tokens are named.

        `answer` is what the log of earlier attempts holds.
        """
        model, deadline_ms = self.model, request.deadline_ms
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
                lora=model.adapter_for(request.model, request.params.lora),
                **known,
            ),
            priority=request.priority.rank,
            tenant=request.tenant,
            cache_salt=request.tenant,
            deadline=None if deadline_ms is None else self._clock.monotonic_s(deadline_ms),
            resumed=resumed if answer.num_tokens else (),
            done=answer.ended_choices,
        )


class PromptEncoder:
    """Renders chats and tokenises prompts for one model. Every method may raise Refused."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, chat: ChatFormat) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._chat = chat

    def render(self, request: JobRequest) -> tuple[str | None, AnswerForm]:
        """Return the chat as the model reads it (None for a prompt), and its answers' form."""
        try:
            chat = self._chat.render(request)
            return chat, self._chat.answer_form(request, chat)
        except TemplateError as error:
            raise Refused(str(error)) from error

    def encode(self, request: JobRequest, chat: str | None) -> Prompt:
        ids = request.prompt_ids
        prompt = Prompt(self._encode(*_text_of(request, chat)) if ids is None else ids)
        if not len(prompt):
            raise Refused("the prompt is empty: it has no tokens")
        if len(prompt) >= self._max_model_len:
            raise Refused(f"the prompt has {len(prompt)} tokens; {self._length_rule}", TOO_LONG)
        return prompt

    def encode_continuations(
        self, request: JobRequest, chat: str | None, prompt: Prompt
    ) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each continuation of the prompt, whose own tokens all share.

        A text is encoded together with the prompt's end, as the model reads both in one piece.
        """
        prompt_ids = prompt.token_ids
        text, special = _text_of(request, chat)
        start, count = 0, 0
        if sum(isinstance(given, str) for given in request.continuations) > 1:
            start, count = self._tokenizer.tail_of(text, prompt_ids, special)
        head = prompt_ids[:count]
        found: list[tuple[int, ...]] = []
        for i, given in enumerate(request.continuations):
            if isinstance(given, str):
                whole = head + self._encode(text[start:] + given, special and not start)
                if whole[: len(prompt_ids)] != prompt_ids or len(whole) == len(prompt_ids):
                    raise Refused(
                        f"continuations[{i}] shares a token with the end of the prompt: begin it "
                        "where a word or a space begins, or give token ids"
                    )
                given = whole[len(prompt_ids) :]
            total = len(prompt_ids) + len(given)
            if total >= self._max_model_len:
                raise Refused(
                    f"the prompt and continuations[{i}] have {total} tokens; the model's length is "
                    f"{self._max_model_len}, of which one is left free",
                    TOO_LONG,
                )
            found.append(given)
        return tuple(found)

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        self._refuse_absurd_length(text)
        return self._tokenizer.encode(text, special)

    def _refuse_absurd_length(self, text: str) -> None:
        """Refuse a text that exceeds the limit by its least possible number of tokens. Tokenising
        megabytes would take seconds of a core.
        """
        least = self._tokenizer.least_tokens(text)
        if least >= self._max_model_len:
            raise Refused(f"the prompt has at least {least} tokens; {self._length_rule}", TOO_LONG)

    @property
    def _length_rule(self) -> str:
        length = self._max_model_len
        return f"the model's length is {length}, of which the answer needs at least 1"


def _text_of(request: JobRequest, chat: str | None) -> tuple[str, bool]:
    """Return the prompt's text, and whether special tokens are added: a chat has them already."""
    return (request.prompt or "", True) if chat is None else (chat, False)
