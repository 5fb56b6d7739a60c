"""Compiles grammars outside of the step: daemon threads, a time limit, and a cache of recent
grammars.

A grammar that takes too long fails, and another compilation may start in its place. Its thread
cannot be stopped, so nothing more is compiled once too many such threads are stuck.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.engine.sampling.grammar.argument_rules import ToolRefused
from tokenmill_worker.engine.sampling.grammar.calls import compile_calls
from tokenmill_worker.engine.sampling.grammar.json_grammar import (
    Encode,
    JsonCompiler,
    SchemaRefused,
)
from tokenmill_worker.engine.sampling.grammar.json_schema import InvalidSchema
from tokenmill_worker.engine.sampling.grammar.text_matcher import TextMatcher

MAX_SOURCE_CHARS = 200_000
TOO_MANY_STUCK = "too many grammars took too long to compile; try again later"
_PREFIX = re.compile(r"^\[[0-9:]+\]\s+\S+:\d+:\s*")  # "[12:00:00] /project/cpp/file.cc:17: "

Compile = Callable[[str, str], Any]  # (kind, source) → what makes a matcher for each sequence
LOOSE_JSON = "json, not strict"


class GrammarError(ValueError):
    """A grammar that cannot be used; its text is one sentence for the user."""


class GrammarCompiler:
    """Compiled grammars by their source; safe for several threads.

    Args:
        tokenizer_info: xgrammar's; it holds the bytes of each token and the ids that end an output.
        encode: the model's own tokenizer, used to write the fixed parts of JSON.
        special_ids: ids that such text never contains.
    """

    def __init__(
        self,
        tokenizer_info: Any,
        *,
        timeout_s: float = 10.0,
        max_threads: int = 2,
        max_cached: int = 256,
        max_stuck: int = 8,
        compile_source: Compile | None = None,
        special_ids: Sequence[int] = (),
        encode: Encode | None = None,
    ) -> None:
        self.tokenizer_info = tokenizer_info
        self.timeout_s = timeout_s
        self._compile_source = compile_source or _compile(tokenizer_info, special_ids, encode)
        self._max_threads, self._max_cached, self._max_stuck = max_threads, max_cached, max_stuck
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Future[Any]] = OrderedDict()
        self._waiting: deque[tuple[tuple[str, str], Future[Any]]] = deque()
        self._running = 0
        self._stuck = 0

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

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """Start compiling the grammar of the parameters; return None if they have none."""
        return None if params.response_format is None else self.compile(params.response_format)

    def compile(self, wanted: ResponseFormat) -> Future[Any]:
        """Return a future of the compiled grammar.

        It fails with GrammarError, at the latest after `timeout_s` of compilation.
        """
        future: Future[Any] = Future()
        try:
            key = source_of(wanted)
        except GrammarError as error:
            future.set_exception(error)
            return future
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                return known
            if self._stuck >= self._max_stuck:
                future.set_exception(GrammarError(TOO_MANY_STUCK))
                return future
            self._cache[key] = future
            while len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
            self._waiting.append((key, future))
            self._start_waiting()
        return future

    def _start_waiting(self) -> None:
        """Start waiting compilations up to the thread limit; the caller holds the lock and has
        checked the stuck threads.
        """
        while self._waiting and self._running < self._max_threads:
            key, future = self._waiting.popleft()
            self._running += 1
            _Run(self, key, future).start()

    def _ended(self, key: tuple[str, str], failed: bool, stuck: int) -> None:
        """Release the place of one compilation.

        `stuck` is +1 if its thread goes on after the time limit, and −1 if such a thread has ended.
        """
        with self._lock:
            self._stuck += stuck
            if stuck >= 0:
                self._running -= 1
            if failed:
                self._cache.pop(key, None)
            refused: list[Future[Any]] = []
            if self._stuck < self._max_stuck:
                self._start_waiting()
            else:
                for waiting, future in self._waiting:
                    self._cache.pop(waiting, None)
                    refused.append(future)
                self._waiting.clear()
        for future in refused:
            future.set_exception(GrammarError(TOO_MANY_STUCK))


class _Run:
    """One compilation and its time limit; whichever ends first settles the future."""

    def __init__(self, owner: GrammarCompiler, key: tuple[str, str], future: Future[Any]) -> None:
        self._owner, self._key, self._future = owner, key, future
        self._lock = threading.Lock()
        self._settled = False
        self._timer = threading.Timer(owner.timeout_s, self._give_up)
        self._timer.daemon = True

    def start(self) -> None:
        self._timer.start()
        threading.Thread(target=self._work, name="grammar", daemon=True).start()

    def _settle(self) -> bool:
        with self._lock:
            first, self._settled = not self._settled, True
            return first

    def _work(self) -> None:
        compiled, problem = None, None
        try:
            compiled = self._owner._compile_source(*self._key)
        except Exception as error:
            problem = GrammarError(sentence(error))
        if not self._settle():
            self._owner._ended(self._key, failed=False, stuck=-1)
            return
        self._timer.cancel()
        self._owner._ended(self._key, failed=problem is not None, stuck=0)
        if problem is None:
            self._future.set_result(compiled)
        else:
            self._future.set_exception(problem)

    def _give_up(self) -> None:
        if self._settle():
            self._owner._ended(self._key, failed=True, stuck=1)
            limit = self._owner.timeout_s
            self._future.set_exception(
                GrammarError(f"the grammar took more than {limit:g} s to compile")
            )


def source_of(wanted: ResponseFormat) -> tuple[str, str]:
    """Return (kind, source), equal for equal grammars.

    Raises GrammarError for a response format that would not be enforced.
    """
    if wanted.calls is not None:
        return _within_limit("tools", msgspec.json.encode(wanted).decode())
    given = [
        (kind, value)
        for kind, value in (
            ("json", wanted.json_schema),
            ("regex", wanted.regex),
            ("grammar", wanted.grammar),
            ("structural_tag", wanted.structural_tag),
        )
        if value is not None
    ]
    if len(given) != 1:
        raise GrammarError("response_format needs exactly one format")
    kind, value = given[0]
    if not isinstance(value, str):
        # an empty schema admits any JSON object
        value = json.dumps(value or {"type": "object"}, separators=(",", ":"))
    if kind == "json" and not wanted.strict:
        kind = LOOSE_JSON
    if not value:
        raise GrammarError(f"the {kind} is empty")
    return _within_limit(kind, value)


def _within_limit(kind: str, value: str) -> tuple[str, str]:
    if len(value) > MAX_SOURCE_CHARS:
        raise GrammarError(
            f"the {kind} has {len(value)} characters; the limit is {MAX_SOURCE_CHARS}"
        )
    return kind, value


def sentence(error: Exception) -> str:
    """Return the library's message without its time stamp and source position."""
    lines = _PREFIX.sub("", str(error).strip()).splitlines()
    return lines[0].strip() if lines and lines[0].strip() else type(error).__name__


def _compile(tokenizer_info: Any, special_ids: Sequence[int], encode: Encode | None) -> Compile:
    """Return the compile function: llguidance for JSON schemas, xgrammar for everything else.

    llguidance either enforces all of a schema or refuses it.
    """
    import xgrammar

    info = tokenizer_info
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    @functools.cache  # reading a large vocabulary takes a second
    def schemas() -> JsonCompiler:
        return JsonCompiler(
            info.decoded_vocab, info.vocab_size, info.stop_token_ids, special_ids, encode
        )

    others: dict[str, Callable[[str], Any]] = {
        "regex": compiler.compile_regex,
        "grammar": lambda source: compiler.compile_grammar(xgrammar.Grammar.from_ebnf(source)),
        "structural_tag": compiler.compile_structural_tag,
    }

    def compile_source(kind: str, source: str) -> Any:
        if kind in ("json", LOOSE_JSON, "tools"):
            try:
                if kind == "tools":
                    return compile_calls(
                        schemas(), msgspec.json.decode(source, type=ResponseFormat)
                    )
                return schemas().compile(source, strict=kind == "json")
            except ToolRefused as refused:
                raise GrammarError(str(refused)) from refused
            except InvalidSchema as problem:
                raise GrammarError(
                    f"response_format.json_schema is no valid JSON schema: {problem}"
                ) from problem
            except SchemaRefused as refusal:
                raise GrammarError(
                    f"response_format.json_schema cannot be enforced: {refusal}"
                ) from refusal
        tokens_of = schemas().tokens_of  # reads the vocabulary now, not within a step
        try:
            compiled = others[kind](source)
        except Exception as error:
            raise GrammarError(
                f"response_format.{kind} cannot be compiled: {sentence(error)}"
            ) from error
        return lambda: TextMatcher(xgrammar.GrammarMatcher(compiled), tokens_of)

    return compile_source
