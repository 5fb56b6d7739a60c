"""Our matchers as vLLM's grammars, in its engine core.

vLLM asks a grammar for masks beside the forward pass. One first reads the tokens that an earlier
attempt has drawn, which end vLLM's prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from tokenmill_worker.engines.own.model.generation_config import read_defaults
from tokenmill_worker.engines.own.model.vocabulary import vocabulary
from tokenmill_worker.engines.own.sampling.grammar.bitmasks import allow_only
from tokenmill_worker.engines.own.sampling.grammar.compiler import GrammarCompiler
from tokenmill_worker.engines.own.sampling.grammar.thoughts import ThoughtsMatcher
from tokenmill_worker.engines.vllm.bound_answer import BoundAnswer


class CoreGrammars:
    """Makes the grammars of one engine core. It reads the model's tokens, and waits for the process
    that compiles grammars, before the first step: beside steps, that takes minutes on few cores.
    """

    def __init__(self, config: Any) -> None:
        folder, size = Path(config.model), config.get_vocab_size()
        self._stops = frozenset(read_defaults("model", folder).end_ids(config.hf_text_config))
        words = vocabulary(folder, size, self._stops, config.trust_remote_code)
        self._compiler = None
        if words is not None:
            self._compiler = GrammarCompiler(
                words.info, special_ids=words.special_ids, encode=words.encode
            )
            self._compiler.start(wait=True)

    def matched(self, request: Any, answer: BoundAnswer) -> MatchedGrammar:
        """Return the grammar of a request, behind what it resumes. Raises GrammarError."""
        matcher = None
        if answer.response_format is not None:
            if self._compiler is None:
                raise ValueError("response_format is not available: the model has no tokenizer")
            matcher = self._compiler.compile(answer.response_format, answer.tenant).result()()
        if answer.thoughts is not None:
            matcher = ThoughtsMatcher(answer.thoughts, matcher, tuple(self._stops))
        grammar, count = MatchedGrammar(matcher, self._stops), answer.num_resumed
        resumed = request.prompt_token_ids[-count:] if count else []
        if not grammar.accept_tokens(request.request_id, resumed):
            raise ValueError("the answer so far does not follow its grammar")
        return grammar


class MatchedGrammar(StructuredOutputGrammar):
    """One answer's matcher. It ends with an end token behind what the grammar requires."""

    def __init__(self, matcher: Any, stops: frozenset[int]) -> None:
        self._matcher, self._stops = matcher, stops
        self._num_ended = 0  # tokens at and behind the end
        self._num_unread = 0  # of these, tokens that the matcher has not read

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return all(map(self._accept, tokens))

    def _accept(self, token: int) -> bool:
        has_ended, is_end = self._num_ended > 0, token in self._stops
        is_unread = has_ended or (is_end and self._matcher.is_terminated())
        self._num_ended += has_ended or is_end
        self._num_unread += is_unread
        return is_unread or bool(self._matcher.accept_token(token))

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
        if num_tokens > self._num_unread:
            self._matcher.rollback(num_tokens - self._num_unread)
        self._num_ended = max(0, self._num_ended - num_tokens)
        self._num_unread = max(0, self._num_unread - num_tokens)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(bitmask, batch_index)
            return
        allow_only(bitmask[batch_index], sorted(self._stops))

    def is_terminated(self) -> bool:
        return self._num_ended > 0

    def reset(self) -> None:
        raise NotImplementedError("a matcher serves one request")
