"""Compiles grammars outside of the step: daemon threads, limits, turns of tenants, and a cache
of recent grammars.

A compilation that goes beyond its limits fails, and another may start in its place. Its thread
cannot be stopped, so nothing more is compiled for a tenant, and then for anybody, once too many
such threads are stuck.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.engine.sampling.grammar.compilation import Compilation, CompileLimits
from tokenmill_worker.engine.sampling.grammar.errors import LATER, GrammarError
from tokenmill_worker.engine.sampling.grammar.libraries import Compile, Libraries
from tokenmill_worker.engine.sampling.grammar.sources import source_of
from tokenmill_worker.engine.sampling.grammar.tenant_queues import TenantQueues
from tokenmill_worker.engine.sampling.grammar.words import Encode

TOO_MANY_STUCK: Final = "too many grammars took too long to compile; try again later"
_Source = tuple[str, str]


class GrammarCompiler:
    """Compiled grammars by their source; safe for several threads. It reads the vocabulary.

    Args:
        tokenizer_info: xgrammar's; it holds the bytes of each token and the ids that end an output.
        special_ids: ids that stand for no text.
        encode: the model's own tokenizer, used to write the fixed parts of answers.
        compile_source: used instead of the libraries.
    """

    def __init__(
        self,
        tokenizer_info: Any,
        *,
        limits: CompileLimits | None = None,
        compile_source: Compile | None = None,
        special_ids: Sequence[int] = (),
        encode: Encode | None = None,
    ) -> None:
        self.tokenizer_info = tokenizer_info
        self.limits = limits or CompileLimits()
        if compile_source is None:
            compile_source = Libraries(tokenizer_info, special_ids, encode).compile
        self._compile_source = compile_source
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Source, Future[Any]] = OrderedDict()
        self._cached_chars = 0
        self._queues: TenantQueues[tuple[_Source, Future[Any]]] = TenantQueues(
            self.limits.threads, self.limits.threads_each
        )
        self._stuck: Counter[str] = Counter()  # threads beyond their limits, by tenant

    @classmethod
    def from_vocab(
        cls,
        vocab: list[bytes] | list[str],
        stop_token_ids: list[int],
        vocab_size: int | None = None,
        **options: Any,
    ) -> GrammarCompiler:
        """Build a compiler from what each id decodes to.

        `vocab_size` is the width of the logits, where they are wider than `vocab`.
        """
        import xgrammar

        info = xgrammar.TokenizerInfo(
            vocab,
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size or len(vocab),
            stop_token_ids=stop_token_ids,
        )
        return cls(info, **options)

    def prepare(self, params: SamplingParams, tenant: str = "") -> Future[Any] | None:
        """Start compiling the grammar of the parameters; return None if they have none."""
        wanted = params.response_format
        return None if wanted is None else self.compile(wanted, tenant)

    def compile(self, wanted: ResponseFormat, tenant: str = "") -> Future[Any]:
        """Return a future of the compiled grammar. It fails with GrammarError."""
        future: Future[Any] = Future()
        try:
            source = source_of(wanted)
        except GrammarError as error:
            future.set_exception(error)
            return future
        with self._lock:
            known = self._cache.get(source)
            if known is not None:
                self._cache.move_to_end(source)
                if known.running() or known.done():
                    return known
                future = known  # it waits for another tenant's turn, and now for this one's too
            elif self._is_refused(tenant):
                future.set_exception(GrammarError(TOO_MANY_STUCK, LATER))
                return future
            else:
                self._keep(source, future)
            self._queues.add(tenant, (source, future))
            refused = self._start_waiting()
        _refuse(refused)
        return future

    def _settled(
        self,
        tenant: str,
        source: _Source,
        future: Future[Any],
        compiled: Any,
        problem: GrammarError | None,
        is_stuck: bool,
    ) -> None:
        """Release the place of one compilation, and settle its future."""
        with self._lock:
            self._queues.free(tenant)
            self._stuck[tenant] += is_stuck
            if problem is not None:
                self._forget(source, future)
            refused = self._start_waiting()
        if problem is None:
            future.set_result(compiled)
        else:
            future.set_exception(problem)
        _refuse(refused)

    def _ended(self, tenant: str) -> None:
        """Note that a thread which went on beyond its limits has ended."""
        with self._lock:
            self._stuck[tenant] -= 1
            refused = self._start_waiting()
        _refuse(refused)

    # ── the rest is called with the lock ──

    def _keep(self, source: _Source, future: Future[Any]) -> None:
        self._cache[source] = future
        self._cached_chars += len(source[1])
        limits = self.limits
        while len(self._cache) > limits.cached or self._cached_chars > limits.cached_chars:
            oldest, its_future = next(iter(self._cache.items()))
            self._forget(oldest, its_future)

    def _forget(self, source: _Source, future: Future[Any]) -> None:
        if self._cache.get(source) is future:
            del self._cache[source]
            self._cached_chars -= len(source[1])

    def _is_refused(self, tenant: str) -> bool:
        limits = self.limits
        return self._stuck.total() >= limits.stuck or self._stuck[tenant] >= limits.stuck_each

    def _start_waiting(self) -> list[Future[Any]]:
        """Start the compilations whose turn it is; return those that are refused."""
        refused: list[Future[Any]] = []
        for tenant in self._queues.tenants():
            if self._is_refused(tenant):
                for source, future in self._queues.drop(tenant):
                    if _is_claimed(future):
                        continue
                    self._forget(source, future)
                    refused.append(future)
        while (turn := self._queues.take()) is not None:
            tenant, (source, future) = turn
            if _is_claimed(future):
                self._queues.free(tenant)
                continue
            Compilation(
                partial(self._compile_source, *source),
                self.limits,
                partial(self._settled, tenant, source, future),
                partial(self._ended, tenant),
            ).start()
        return refused


def _is_claimed(future: Future[Any]) -> bool:
    """Claim a waiting future; return True if the turn of another tenant has claimed it before."""
    if future.running() or future.done():
        return True
    future.set_running_or_notify_cancel()
    return False


def _refuse(futures: list[Future[Any]]) -> None:
    for future in futures:
        future.set_exception(GrammarError(TOO_MANY_STUCK, LATER))
