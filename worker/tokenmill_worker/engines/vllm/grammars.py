"""Our matchers as vLLM's grammars, in its engine core.

vLLM asks a grammar for masks beside the forward pass. One first reads the tokens that an earlier
attempt has drawn, which end vLLM's prompt.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from tokenmill_worker.engines.own.model.vocabulary import vocabulary
from tokenmill_worker.engines.own.sampling.grammar.compiler import GrammarCompiler
from tokenmill_worker.engines.own.sampling.grammar.thoughts import ThoughtsMatcher
from tokenmill_worker.engines.vllm.bound_answer import BoundAnswer


def matched(model_config: Any, request: Any, answer: BoundAnswer) -> Any:
    """Return the grammar of a request, behind what it resumes. Raises GrammarError."""
    stops = answer.eos
    matcher = None
    if answer.response_format is not None:
        compiler = _compiler(
            model_config.model,
            model_config.get_vocab_size(),
            stops,
            model_config.trust_remote_code,
        )
        matcher = compiler.compile(answer.response_format, answer.tenant).result()()
    if answer.thoughts is not None:
        matcher = ThoughtsMatcher(answer.thoughts, matcher, stops)
    grammar = MatchedGrammar(matcher, stops)
    count = answer.num_resumed
    if count and not grammar.accept_tokens(request.request_id, request.prompt_token_ids[-count:]):
        raise ValueError("the answer so far does not follow its grammar")
    return grammar


@functools.cache  # one engine core has one model
def _compiler(folder: str, vocab_size: int, stops: tuple[int, ...], is_trusted: bool) -> Any:
    words = vocabulary(Path(folder), vocab_size, frozenset(stops), is_trusted)
    if words is None:
        raise ValueError("response_format is not available: the model has no tokenizer")
    return GrammarCompiler(words.info, special_ids=words.special_ids, encode=words.encode)


class MatchedGrammar(StructuredOutputGrammar):
    """One answer's matcher. It ends with an end token behind what the grammar requires."""

    def __init__(self, matcher: Any, stops: tuple[int, ...]) -> None:
        self._matcher, self._stops, self._has_ended = matcher, frozenset(stops), False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return all(map(self._accept, tokens))

    def _accept(self, token: int) -> bool:
        if self._has_ended:
            return True
        if token in self._stops and self._matcher.is_terminated():
            self._has_ended = True
            return True
        self._has_ended = token in self._stops
        return bool(self._matcher.accept_token(token))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        accepted: list[int] = []
        for token in tokens:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                break
            accepted.append(token)
        if accepted:
            self._matcher.rollback(len(accepted))
        return accepted

    def rollback(self, num_tokens: int) -> None:
        if self._has_ended and num_tokens:
            self._has_ended, num_tokens = False, num_tokens - 1
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(bitmask, batch_index)
            return
        row = bitmask[batch_index].numpy().view("uint32")
        row[:] = 0
        for token in self._stops:
            row[token // 32] |= 1 << (token % 32)

    def is_terminated(self) -> bool:
        return self._has_ended

    def reset(self) -> None:
        raise NotImplementedError("a matcher serves one request")
