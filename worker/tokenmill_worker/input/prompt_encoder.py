"""Turns prompts, chats and continuations into the token ids that the model reads."""

from __future__ import annotations

from tokenmill_schemas.job import JobRequest
from tokenmill_worker.contract.requests import Prompt
from tokenmill_worker.input.outcomes import TOO_LONG, Refused
from tokenmill_worker.text.chat.chat_format import AnswerForm, ChatFormat
from tokenmill_worker.text.chat.templates import TemplateError
from tokenmill_worker.text.tokenizer import Tokenizer


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
