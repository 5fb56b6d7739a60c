"""Turns a request's prompt or chat into the token ids that the model reads."""

from __future__ import annotations

from tokenmill_schemas.job import JobRequest
from tokenmill_worker.consume.refusal import TOO_LONG, Refused
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

    async def encode(self, request: JobRequest, chat: str | None) -> tuple[int, ...]:
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
            raise Refused("the prompt is empty: it has no tokens")
        if len(prompt_ids) >= self._max_model_len:
            raise Refused(f"the prompt has {len(prompt_ids)} tokens; {self._length_rule}", TOO_LONG)
        return prompt_ids

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
