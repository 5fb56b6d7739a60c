"""Joins what one model's chats have of their own: template, marks of thoughts, form of tool calls.

It renders a request's chat, and says how its answers are read and what the engine must bind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from tokenmill_schemas.generation import CallGrammar, ResponseFormat
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.text.chat.call_parser import CallParser
from tokenmill_worker.text.chat.reasoning import ChannelFormat, Opening, ReasoningFormat
from tokenmill_worker.text.chat.templates import TemplateError
from tokenmill_worker.text.chat.tools import ToolFormat, call_grammar, call_ids
from tokenmill_worker.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Describes how the answers to one request are read.

    `opening`: their thoughts are recognised. If they may call tools, `calls` makes the parser of a
    choice, and `grammar` binds the engine.
    """

    opening: Opening | None = None
    calls: Callable[[int], CallParser] | None = None
    grammar: CallGrammar | None = None

    def bound(self, generation: GenerationRequest) -> GenerationRequest:
        """Return the engine's request with what this form asks of it. The engine learns of thoughts
        only where anything depends on them.
        """
        params = generation.params
        if self.grammar is not None:
            wanted = params.response_format or ResponseFormat()
            wanted = msgspec.structs.replace(wanted, calls=self.grammar)
            params = msgspec.structs.replace(params, response_format=wanted)
        thoughts = None if self.opening is None else self.opening.thoughts
        if params.response_format is None and params.thinking_budget is None:
            thoughts = None
        if self.grammar is not None and self.grammar.asides:
            thoughts = None  # the grammar has them among its messages
        if thoughts is not None:
            thoughts = msgspec.structs.replace(thoughts, budget=params.thinking_budget)
        return msgspec.structs.replace(generation, params=params, thoughts=thoughts)


class ChatFormat:
    """The chat format of one model. `reasoning` and `tools` are None where it has no such form."""

    def __init__(
        self, tokenizer: Tokenizer, reasoning: ReasoningFormat | None, tools: ToolFormat | None
    ) -> None:
        self._template = tokenizer.template
        self._reasoning = reasoning
        self._tools = tools
        self._marks = {} if tools is None else tokenizer.special_marks(tools)

    def render(self, request: JobRequest) -> str | None:
        """Return the chat as the model reads it; None for a prompt. Raises TemplateError."""
        if request.messages is None:
            return None
        return self._template.render(
            request.messages,
            documents=request.documents,
            continue_final_message=request.continue_final_message,
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
            tools=request.tools if _may_call(request) else (),
        )

    def answer_form(self, request: JobRequest, chat: str | None) -> AnswerForm:
        """Return the form of the answers; `chat` is what `render` gave. What follows a prompt is
        its continuation, so it has neither thoughts nor calls; nor has an answer that the request
        gives. Raises TemplateError.
        """
        if request.continuations:
            return AnswerForm()
        opening = None
        if self._reasoning is not None and chat is not None:
            messages = request.messages or ()
            begun = messages[-1].text if request.continue_final_message and messages else ""
            opening = self._reasoning.opening(chat, begun)
        elif request.params.thinking_budget is not None:
            raise TemplateError(
                "thinking_budget needs messages, and a model whose thoughts the worker recognises"
            )
        if not _may_call(request):
            return AnswerForm(opening)
        grammar, id_chars = self._grammar(request, chat)

        def parser(choice: int) -> CallParser:
            return CallParser(grammar, call_ids(request.job_id, choice, id_chars))

        return AnswerForm(opening, parser, grammar)

    def _grammar(self, request: JobRequest, chat: str | None) -> tuple[CallGrammar, int]:
        form = self._tools
        if form is None or (form.asides and not isinstance(self._reasoning, ChannelFormat)):
            raise TemplateError(
                "tools cannot be used with this model: its chat template has no form of tool calls "
                "that is known"
            )
        for problem in _problems(form, request, chat or ""):
            raise TemplateError(f"tools cannot be used with this model and {problem}")
        grammar = call_grammar(
            form,
            self._marks,
            request.tools,
            request.tool_choice,
            request.parallel_tool_calls,
            has_schema=request.params.response_format is not None,
        )
        return grammar, form.id_chars


def _problems(form: ToolFormat, request: JobRequest, chat: str) -> Iterator[str]:
    """Yield what a request has that this form of calls cannot go with."""
    params = request.params
    if form.asides and params.thinking_budget is not None:
        yield "thinking_budget"
    if form.asides and chat.rpartition("<|start|>")[2].strip() != "assistant":
        yield "a prompt that does not end where an answer begins"
    if params.response_format is not None and form.at_start | form.trigger.startswith("{"):
        yield "response_format: a JSON answer may begin as a call does"


def _may_call(request: JobRequest) -> bool:
    return bool(request.tools) and request.tool_choice != "none"
