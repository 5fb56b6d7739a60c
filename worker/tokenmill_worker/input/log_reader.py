"""Reads the log of a job's earlier attempts, and rebuilds the answer so far from it, as if this
worker had generated it.

The module checks the order of the chunks, and applies the rules by which tokens end an answer. The
reason for the redelivery does not matter here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import DecodeError, decode_chunk
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.requests import Prompt
from tokenmill_worker.input.outcomes import Refused
from tokenmill_worker.input.served_model import ServedModel
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.text.chat.chat_format import AnswerForm
from tokenmill_worker.text.job_output import JobOutput
from tokenmill_worker.text.tokenizer import Tokenizer


class LogReader:
    """Reads the logs of jobs of one model. Both methods raise Refused for a log that cannot be
    continued.
    """

    def __init__(self, tokenizer: Tokenizer, model: ServedModel) -> None:
        self._tokenizer = tokenizer
        self._model = model

    def read(self, delivery: Delivery) -> list[Chunk]:
        try:
            return read_log(delivery.log, self._model.vocab_size)
        except LogCorrupt as error:
            raise Refused(str(error), "corrupt_log") from error

    def resume(
        self,
        delivery: Delivery,
        chunks: list[Chunk],
        params: SamplingParams,
        form: AnswerForm,
        prompt: Prompt,
    ) -> JobOutput:
        """Return the answer with the logged tokens in it; without a log it is empty."""
        answer = JobOutput.start(
            self._tokenizer, params, form.opening, form.calls, prompt.token_ids
        )
        answer.queue_ms = max(0, delivery.started_ms - delivery.created_ms)
        try:
            stops = self._model.stop_token_ids(params)
            params = msgspec.structs.replace(params, stop_token_ids=stops)
            replay(answer, chunks, EndRules.of(params, self._model.eos_token_ids))
        except LogCorrupt as error:
            raise Refused(str(error), "corrupt_log") from error
        return answer


class LogCorrupt(ValueError):
    """The log cannot be continued; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class EndRules:
    """The engine's rules by which tokens alone end a choice. They are needed if the engine died
    before it could report the end.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int]) -> EndRules:
        eos = frozenset() if params.ignore_eos else eos_token_ids
        return cls(params.max_tokens, params.min_tokens, eos | frozenset(params.stop_token_ids))

    def reason(self, token_ids: list[int]) -> FinishReason | None:
        if token_ids and token_ids[-1] in self.stop_token_ids and len(token_ids) >= self.min_tokens:
            return FinishReason.STOP
        is_full = self.max_tokens is not None and len(token_ids) >= self.max_tokens
        return FinishReason.LENGTH if is_full else None


def read_log(entries: Iterable[bytes], vocab_size: int = 1 << 31) -> list[Chunk]:
    """Decode the chunks, and check that they are one unbroken run of tokens for each choice. Raises
    LogCorrupt.
    """
    chunks: list[Chunk] = []
    ends: defaultdict[int, int] = defaultdict(int)
    for entry in entries:
        try:
            chunk = decode_chunk(entry)
        except DecodeError as error:
            raise LogCorrupt(
                f"entry {len(chunks)} of the log of earlier attempts cannot be read: {error}"
            ) from error
        due = ends[chunk.choice]
        if chunk.index != due:
            raise LogCorrupt(
                f"the log of earlier attempts has token {chunk.index} of choice {chunk.choice} "
                f"where {due} was due"
            )
        if chunk.token_ids and not 0 <= min(chunk.token_ids) <= max(chunk.token_ids) < vocab_size:
            raise LogCorrupt(
                f"the log of earlier attempts has a token after {due} that this model does not know"
            )
        if chunk.logprobs is not None and len(chunk.logprobs) < len(chunk.token_ids):
            raise LogCorrupt(
                f"the log of earlier attempts lacks log-probabilities after {due} tokens"
            )
        if (
            chunk.prompt is not None
            and len(chunk.prompt.logprobs) != len(chunk.prompt.token_ids) - 1
        ):
            raise LogCorrupt("the log of earlier attempts lacks log-probabilities of the prompt")
        chunks.append(chunk)
        ends[chunk.choice] = chunk.end
    return chunks


def replay(answer: JobOutput, chunks: Iterable[Chunk], rules: EndRules) -> None:
    """Add the logged tokens to a new answer, and end the choices that had ended. Raises
    LogCorrupt.
    """
    for chunk in chunks:
        if not 0 <= chunk.choice < len(answer.choices):
            raise LogCorrupt(
                f"the log of earlier attempts has a choice {chunk.choice} of {len(answer.choices)}"
            )
        if chunk.usage is not None:  # measured at the job's first token
            answer.cached_tokens = chunk.usage.cached_tokens
            answer.ttft_ms = chunk.usage.ttft_ms
        if chunk.prompt is not None:
            answer.prompt_ids = chunk.prompt.token_ids
            answer.prompt_logprobs = []
            answer.score_prompt(chunk.prompt.logprobs)
        answer.push(chunk.choice, chunk.token_ids, chunk.logprobs)
        if answer.choices[chunk.choice].num_tokens != chunk.end:
            raise LogCorrupt(
                f"the log of earlier attempts goes on after the end of choice {chunk.choice}"
            )
        if chunk.finish_reason is not None:
            answer.end(chunk.choice, chunk.finish_reason, with_last_token=bool(chunk.token_ids))
    for index, choice in enumerate(answer.choices):
        reason = rules.reason(choice.stream.token_ids)
        if reason is not None:
            answer.end(index, reason, with_last_token=False)
