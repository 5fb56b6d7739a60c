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
_Failure = tuple[Future[Any], GrammarError]


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
            if known is not None and (known.running() or known.done()):
                self._cache.move_to_end(source)
                return known
            if self._is_refused(tenant):
                future.set_exception(GrammarError(TOO_MANY_STUCK, LATER))
                return future
            if known is None:
                self._keep(source, future)
            else:  # it waits for another tenant's turn, and now for this one's too
                self._cache.move_to_end(source)
                future = known
            self._queues.add(tenant, (source, future))
        self._start_waiting()
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
        """Release the place of one compilation, and settle its future before another starts."""
        with self._lock:
            self._queues.free(tenant)
            if is_stuck:
                self._count_stuck(tenant, 1)
            if problem is not None:
                self._forget(source, future)
        if problem is None:
            future.set_result(compiled)
        else:
            future.set_exception(problem)
        self._start_waiting()

    def _ended(self, tenant: str) -> None:
        """Note that a thread which went on beyond its limits has ended."""
        with self._lock:
            self._count_stuck(tenant, -1)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start the compilations whose turn it is; fail those that are refused or cannot start."""
        with self._lock:
            failed = self._refuse_stuck() + self._take_turns()
        for future, problem in failed:
            future.set_exception(problem)

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

    def _count_stuck(self, tenant: str, change: int) -> None:
        """Change the count of a tenant's stuck threads. A thread that ends as it passes its limit
        may be counted off first.
        """
        self._stuck[tenant] += change
        if not self._stuck[tenant]:
            del self._stuck[tenant]

    def _refuse_stuck(self) -> list[_Failure]:
        """Drop what waits for tenants who are refused; return what waits for no other tenant."""
        refused = [tenant for tenant in self._queues.tenants() if self._is_refused(tenant)]
        dropped = [item for tenant in refused for item in self._queues.drop(tenant)]
        kept = {future for _, future in self._queues.items()} if dropped else set()
        failures: list[_Failure] = []
        for source, future in dropped:
            if future not in kept and not _is_claimed(future):
                self._forget(source, future)
                failures.append((future, GrammarError(TOO_MANY_STUCK, LATER)))
        return failures

    def _take_turns(self) -> list[_Failure]:
        """Start the compilations whose turn it is; return those that cannot start."""
        failures: list[_Failure] = []
        while (turn := self._queues.take()) is not None:
            tenant, (source, future) = turn
            if _is_claimed(future):
                self._queues.free(tenant)
                continue
            compilation = Compilation(
                partial(self._compile_source, *source),
                self.limits,
                partial(self._settled, tenant, source, future),
                partial(self._ended, tenant),
            )
            try:
                compilation.start()
            except GrammarError as problem:
                self._queues.free(tenant)
                self._forget(source, future)
                failures.append((future, problem))
        return failures


def _is_claimed(future: Future[Any]) -> bool:
    """Claim a waiting future; return True if the turn of another tenant has claimed it before."""
    if future.running() or future.done():
        return True
    future.set_running_or_notify_cancel()
    return False
