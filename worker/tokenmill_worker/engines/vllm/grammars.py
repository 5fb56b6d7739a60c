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


class CoreGrammars:
    """Makes the grammars of one engine core. It reads the model's tokens, and waits for the process
    that compiles grammars, before the first step: beside steps, that takes minutes on few cores.
    """

    def __init__(self, config: Any) -> None:
        folder = Path(config.model)
        stops = read_defaults("model", folder).end_ids(config.hf_text_config)
        words = vocabulary(folder, config.get_vocab_size(), stops, config.trust_remote_code)
        self._compiler = None if words is None else words.compiler()
        if self._compiler is not None:
            self._compiler.start(wait=True)

    def matched(
        self, request: Any, form: Any, thoughts: Any, num_resumed: int, tenant: str
    ) -> MatchedGrammar:
        """Return the grammar of a request, behind what it resumes. Raises GrammarError."""
        assert self._compiler is not None, "no request is bound where there is no tokenizer"
        compiled = None if form is None else self._compiler.compile(form, tenant).result()
        grammar = MatchedGrammar(self._compiler.matcher(compiled, thoughts))
        start = len(request.prompt_token_ids) - num_resumed
        if not grammar.accept_tokens(request.request_id, request.prompt_token_ids[start:]):
            raise ValueError("the answer so far does not follow its grammar")
        return grammar


class MatchedGrammar(StructuredOutputGrammar):
    """One answer's matcher. It ends with an end token behind what the grammar requires."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self._stops = matcher, matcher.stop_token_ids
        self._num_ended = 0  # tokens at and behind the end
        self._num_unread = 0  # of these, tokens that the matcher has not read

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return all(map(self._accept, tokens))

    def _accept(self, token: int) -> bool:
        is_end = self._num_ended > 0 or token in self._stops
        is_unread = self._num_ended > 0 or (is_end and self._matcher.is_terminated())
        if not is_unread and not self._matcher.accept_token(token):
            return False
        self._num_ended += is_end
        self._num_unread += is_unread
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        accepted: list[int] = []
        for token in tokens:
            if self._num_ended or not self._accept(token):
                break
            accepted.append(token)
        self.rollback(len(accepted))
        return accepted

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > self._num_unread:
            self._matcher.rollback(num_tokens - self._num_unread)
        self._num_ended = max(0, self._num_ended - num_tokens)
        self._num_unread = max(0, self._num_unread - num_tokens)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        if self._matcher.is_terminated():
            allow_only(bitmask[batch_index], self._stops)
        else:
            self._matcher.fill_next_token_bitmask(bitmask, batch_index)

    def is_terminated(self) -> bool:
        return self._num_ended > 0

    def reset(self) -> None:
        raise NotImplementedError("a matcher serves one request")
