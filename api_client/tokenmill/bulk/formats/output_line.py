"""Builds lines of the output and error files, from a job's result or from a line that has no job.

The text of each token comes from the result, which has the place where each token's text ends. For
tokens that were not chosen only the id is known here; they are named `token_id:ID`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

import msgspec
from msgspec import UNSET

from tokenmill.bulk.batch import Totals
from tokenmill.bulk.formats.input_file import BadLine, line_of
from tokenmill.bulk.formats.response_object import response_of
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.openai import (
    CHAT_URL,
    RESPONSES_URL,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionUsage,
    ErrorBody,
    ErrorObject,
    LineError,
    OutputLine,
    PromptDetails,
    ReasoningDetails,
    Response,
    ResponseObject,
    TokenLogprobs,
    TopLogprob,
)
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus, ScoredPrompt

_encoder: Final = msgspec.json.Encoder()
_LINE_ENDS: Final = [
    (mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in ("\u2028", "\u2029", "\x85")
]
_REASONS: Final[dict[FinishReason | None, Literal["stop", "length"]]] = {
    FinishReason.LENGTH: "length"
}
# errors caused by the request; every other error has status 500
_BAD_REQUESTS: Final = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "model_not_found": 404,
}
EXPIRED: Final = LineError(
    "batch_expired", "This request could not be executed before the completion window expired."
)
CANCELLED: Final = LineError("batch_cancelled", "This request was cancelled with its batch.")
LOST: Final = LineError(
    "result_unavailable",
    "Redis has deleted this request's result, and there is no database that has it.",
)
UNREADABLE: Final = LineError(
    "result_unreadable", "This request's result is damaged, or a newer version wrote it."
)
_WITHOUT_RESPONSE: Final = {JobStatus.EXPIRED: EXPIRED, JobStatus.CANCELLED: CANCELLED}


@dataclass(frozen=True, slots=True)
class EncodedLine:
    """A line for one of the two files, without its newline. `share` is what it adds to the batch's
    totals.
    """

    line: int
    data: bytes
    share: Totals

    @property
    def is_error(self) -> bool:
        return not self.share.completed


def _encode(line: OutputLine) -> bytes:
    """Encode a line. Marks that some readers take for the end of a line (U+2028, U+2029, and U+0085
    as Python's `splitlines`) are escaped.
    """
    data = _encoder.encode(line)
    for mark, escape in _LINE_ENDS:
        data = data.replace(mark, escape)
    return data


def request_name(batch_id: str, line: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line}"


def line_number(name: str) -> int:
    """Return the number of the input line that an output line answers. Raises ValueError."""
    return int(name.rpartition("_")[2])


def of_result(batch_id: str, result: JobResult) -> EncodedLine:
    line = line_of(batch_id, result.job_id)
    name, custom_id = request_name(batch_id, line), result.metadata.get("custom_id")
    refusal = _WITHOUT_RESPONSE.get(result.status)
    if refusal is not None:
        out = OutputLine(id=name, custom_id=custom_id, error=refusal)
        return EncodedLine(line, _encode(out), _share(result))
    is_good = result.status is JobStatus.SUCCEEDED
    response = Response(
        status_code=200
        if is_good
        else _BAD_REQUESTS.get(result.error.code if result.error else "", 500),
        request_id=result.job_id,
        body=_answer(result) if is_good else _failure(result),
    )
    return EncodedLine(
        line, _encode(OutputLine(id=name, custom_id=custom_id, response=response)), _share(result)
    )


def of_bad_line(batch_id: str, bad: BadLine) -> EncodedLine:
    name = request_name(batch_id, bad.line)
    if not bad.status:
        line = OutputLine(id=name, custom_id=bad.custom_id, error=LineError(bad.code, bad.message))
    else:
        body = ErrorBody(ErrorObject(message=bad.message, param=bad.param, code=bad.code))
        response = Response(status_code=bad.status, request_id=name, body=body)
        line = OutputLine(id=name, custom_id=bad.custom_id, response=response)
    return EncodedLine(
        bad.line, _encode(line), Totals(failed=1, expired=int(bad.code == EXPIRED.code))
    )


def unanswered(line: int, custom_id: str | None, why: LineError) -> BadLine:
    return BadLine(line, custom_id, why.code, why.message)


def _share(result: JobResult) -> Totals:
    is_good, used = result.status is JobStatus.SUCCEEDED, result.usage
    return Totals(
        completed=int(is_good),
        failed=int(not is_good),
        expired=int(result.status is JobStatus.EXPIRED),
        input_tokens=used.prompt_tokens,
        cached_tokens=used.cached_tokens,
        output_tokens=used.completion_tokens,
        reasoning_tokens=used.reasoning_tokens,
    )


def _failure(result: JobResult) -> ErrorBody:
    code = result.error.code if result.error else result.status.value
    return ErrorBody(
        ErrorObject(
            message=result.error.message
            if result.error
            else f"the job ended as {result.status.value}",
            type="invalid_request_error" if code in _BAD_REQUESTS else "server_error",
            code=code,
        )
    )


def _answer(result: JobResult) -> ChatCompletion | Completion | ResponseObject:
    endpoint = result.metadata.get("endpoint")
    if endpoint == RESPONSES_URL:
        logprobs = _chat_logprobs(result.choices[0]) if result.choices else None
        return response_of(result, logprobs.content if logprobs else ())
    used = result.usage
    usage = CompletionUsage(
        prompt_tokens=used.prompt_tokens,
        completion_tokens=used.completion_tokens,
        total_tokens=used.prompt_tokens + used.completion_tokens,
        prompt_tokens_details=PromptDetails(used.cached_tokens),
        completion_tokens_details=ReasoningDetails(used.reasoning_tokens)
        if used.reasoning_tokens
        else UNSET,
    )
    created = result.created_ms // 1000
    if endpoint == CHAT_URL:
        chats = [_chat_choice(choice) for choice in result.choices]
        return ChatCompletion(
            id=f"chatcmpl-{result.job_id}",
            created=created,
            model=result.model,
            choices=chats,
            usage=usage,
        )
    texts = [_text_choice(choice, result.prompt) for choice in result.choices]
    return Completion(
        id=f"cmpl-{result.job_id}", created=created, model=result.model, choices=texts, usage=usage
    )


def _chat_choice(choice: ChoiceResult) -> ChatChoice:
    return ChatChoice(
        index=choice.index,
        message=_message(choice),
        logprobs=_chat_logprobs(choice),
        finish_reason="tool_calls"
        if choice.finish_reason is FinishReason.TOOL_CALLS
        else _REASONS.get(choice.finish_reason, "stop"),
    )


def _message(choice: ChoiceResult) -> ChatMessage:
    """Return the answer as a message. A call that was cut is left out: it is no call yet."""
    calls = [
        ChatToolCall(call.id, CalledFunction(call.name, call.arguments))
        for call in choice.tool_calls
        if call.is_complete
    ]
    return ChatMessage(
        choice.text or (None if calls else ""),
        tool_calls=calls or UNSET,
        reasoning_content=choice.reasoning or UNSET,
    )


def _chat_logprobs(choice: ChoiceResult) -> ChatLogprobs | None:
    if choice.logprobs is None:
        return None
    content = [
        TokenLogprobs(
            token=text,
            logprob=entry.logprob,
            bytes=list(text.encode()),
            top_logprobs=[
                _top(token, value, choice.token_ids[place], text) for token, value in entry.top
            ],
        )
        for place, (text, entry) in enumerate(zip(_pieces(choice), choice.logprobs, strict=False))
    ]
    return ChatLogprobs(content)


def _top(token_id: int, logprob: float, chosen: int, text: str) -> TopLogprob:
    if token_id == chosen:
        return TopLogprob(text, logprob, list(text.encode()))
    return TopLogprob(f"token_id:{token_id}", logprob)


def _text_choice(choice: ChoiceResult, prompt: ScoredPrompt | None) -> CompletionChoice:
    return CompletionChoice(
        index=choice.index,
        text=choice.text,
        logprobs=_text_logprobs(choice, prompt),
        finish_reason=_REASONS.get(choice.finish_reason, "stop"),
    )


def _text_logprobs(choice: ChoiceResult, prompt: ScoredPrompt | None) -> CompletionLogprobs | None:
    """Return the log-probabilities of the choice, after those of a prompt that it echoes."""
    if choice.logprobs is None:
        return None
    ids, entries, ends, pieces = (
        choice.token_ids,
        choice.logprobs,
        choice.text_ends,
        _pieces(choice),
    )
    first: list[None] = []  # stands for the prompt's first token
    if prompt is not None and prompt.text_ends:
        first = [None]
        own = [piece[prompt.text_ends[-1] :] for piece in pieces[:1]]
        pieces = [*_cut(choice.text, prompt.text_ends), *own, *pieces[1:]]
        ids, ends = prompt.token_ids + ids, prompt.text_ends + ends
        entries = prompt.logprobs + entries
    scored = zip(pieces[len(first) :], ids[len(first) :], entries, strict=False)
    tops = [
        {text if token == chosen else f"token_id:{token}": value for token, value in entry.top}
        for text, chosen, entry in scored
    ]
    return CompletionLogprobs(
        tokens=pieces,
        token_logprobs=[*first, *(entry.logprob for entry in entries)],
        top_logprobs=[*first, *tops],
        text_offset=[0, *ends[:-1]][: len(pieces)],
    )


def _pieces(choice: ChoiceResult) -> list[str]:
    """Return the text of each token, of thoughts or of the answer; "" for a token that only began a
    character, or whose text was held back.
    """
    texts = _cut(choice.text, choice.text_ends)
    thoughts = _cut(choice.reasoning, choice.reasoning_ends)
    return [thought + text for thought, text in zip_longest(thoughts, texts, fillvalue="")]


def _cut(text: str, ends: tuple[int, ...]) -> list[str]:
    return [text[start:end] for start, end in zip((0, *ends[:-1]), ends, strict=False)]
