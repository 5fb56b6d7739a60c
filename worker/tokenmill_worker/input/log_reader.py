"""Reads the log of a job's earlier attempts, and rebuilds the answer so far from it."""

from __future__ import annotations

import msgspec

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.prompt import Prompt
from tokenmill_worker.input.refusal import Refused
from tokenmill_worker.input.served_model import ServedModel
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.text.chat.chat_format import AnswerForm
from tokenmill_worker.text.job_output import JobOutput
from tokenmill_worker.text.resume import EndRules, LogCorrupt, read_log, replay
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
