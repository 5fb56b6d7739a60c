"""Compiles grammars outside of the step: threads, turns of tenants, and a cache of recent grammars.

A thread waits for the process that compiles each grammar first, within limits: only what ends there
reaches this process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.contract.requests import Thoughts
from tokenmill_worker.engines.own.sampling.grammar.errors import LATER, GrammarError
from tokenmill_worker.engines.own.sampling.grammar.libraries import Libraries
from tokenmill_worker.engines.own.sampling.grammar.process import CompileLimits, GrammarProcess
from tokenmill_worker.engines.own.sampling.grammar.sources import sentence, source_of
from tokenmill_worker.engines.own.sampling.grammar.tenant_queues import TenantQueues
from tokenmill_worker.engines.own.sampling.grammar.thoughts import ThoughtsMatcher
from tokenmill_worker.engines.own.sampling.grammar.words import Encode

Compile: TypeAlias = Callable[[str, str], Any]  # (kind, source) → makes each sequence's matcher
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
        self._process: GrammarProcess | None = None
        if compile_source is None:
            self._process = GrammarProcess(tokenizer_info, special_ids, self.limits)
            compile_source = _both(self._process, Libraries(tokenizer_info, special_ids, encode))
        self._compile_source = compile_source
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Source, Future[Any]] = OrderedDict()
        self._cached_chars = 0
        self._queues: TenantQueues[tuple[_Source, Future[Any]]] = TenantQueues(
            self.limits.threads, self.limits.threads_each
        )

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

    def start(self, *, wait: bool = False) -> None:
        """Start the process in the background, or `wait` for it; otherwise the first grammar starts
        it.
        """
        if self._process is not None:
            self._process.start(wait=wait)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

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
            if known is None:
                self._keep(source, future)
            else:  # it waits for another tenant's turn, and now for this one's too
                self._cache.move_to_end(source)
                future = known
            self._queues.add(tenant, (source, future))
        self._start_waiting()
        return future

    def matcher(self, compiled: Any, thoughts: Thoughts | None) -> Any:
        """Return one sequence's matcher of a compiled grammar, or of None, behind its thoughts."""
        inner = None if compiled is None else compiled()
        if thoughts is None:
            return inner
        return ThoughtsMatcher(thoughts, inner, self.tokenizer_info.stop_token_ids)

    def _run(self, tenant: str, source: _Source, future: Future[Any]) -> None:
        """Compile one grammar; release its place, and settle its future before another starts."""
        compiled, problem = None, None
        try:
            compiled = self._compile_source(*source)
        except Exception as error:
            problem = _problem(error)
        with self._lock:
            self._queues.free(tenant)
            if problem is not None:
                self._forget(source, future)
        if problem is None:
            future.set_result(compiled)
        else:
            future.set_exception(problem)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start the compilations whose turn it is; fail those that cannot start."""
        with self._lock:
            failed = self._take_turns()
        for future in failed:
            future.set_exception(
                GrammarError(
                    "the machine has no thread left to compile the grammar; try again later", LATER
                )
            )

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

    def _take_turns(self) -> list[Future[Any]]:
        """Start the compilations whose turn it is; return those that cannot start."""
        failed: list[Future[Any]] = []
        while (turn := self._queues.take()) is not None:
            tenant, (source, future) = turn
            if _is_claimed(future):
                self._queues.free(tenant)
                continue
            try:
                threading.Thread(
                    target=self._run, args=(tenant, source, future), name="grammar", daemon=True
                ).start()
            except (RuntimeError, MemoryError):
                self._queues.free(tenant)
                self._forget(source, future)
                failed.append(future)
        return failed


def _both(process: GrammarProcess, libraries: Libraries) -> Compile:
    return lambda kind, source: libraries.started(kind, source, process.compiled(kind, source))


def _problem(error: Exception) -> GrammarError:
    if isinstance(error, GrammarError):
        return error
    if isinstance(error, MemoryError):
        return GrammarError(
            "the memory was too short to compile the grammar; try again later", LATER
        )
    return GrammarError(sentence(error))


def _is_claimed(future: Future[Any]) -> bool:
    """Claim a waiting future; return True if the turn of another tenant has claimed it before."""
    if future.running() or future.done():
        return True
    future.set_running_or_notify_cancel()
    return False
