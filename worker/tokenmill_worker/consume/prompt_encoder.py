"""Turns a request's prompt or chat into the token ids that the model reads."""

from __future__ import annotations

import msgspec

from tokenmill_schemas.job import JobRequest
from tokenmill_worker.consume.refusal import TOO_LONG, Refused
from tokenmill_worker.engine.types import Thoughts
from tokenmill_worker.text.chat.reasoning import Opening, ReasoningFormat
from tokenmill_worker.text.chat.templates import TemplateError
from tokenmill_worker.text.tokenizer import Tokenizer


class PromptEncoder:
    """Renders chats and tokenises prompts for one model. Every method may raise Refused."""

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, reasoning: ReasoningFormat | None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._reasoning = reasoning

    def render(self, request: JobRequest) -> str | None:
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
            raise Refused(str(error)) from error

    def opening(self, request: JobRequest, chat: str | None) -> Opening | None:
        """Return how the answer begins; None if it has no thoughts that are told apart. What
        follows a prompt is its continuation, so only a chat's answer has thoughts.
        """
        if self._reasoning is not None and chat is not None:
            return self._reasoning.opening(chat)
        if request.params.thinking_budget is not None:
            raise Refused(
                "thinking_budget needs messages, and a model whose thoughts are told apart"
            )
        return None

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


def thoughts_for_engine(request: JobRequest, opening: Opening | None) -> Thoughts | None:
    """Return what the engine must know of the thoughts, where anything depends on them."""
    params = request.params
    if opening is None or opening.thoughts is None:
        return None
    if params.response_format is None and params.thinking_budget is None:
        return None
    return msgspec.structs.replace(opening.thoughts, budget=params.thinking_budget)
