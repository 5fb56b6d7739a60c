"""Structured output: grammars compiled off the step's path, and the masks that hold sequences to them.

xgrammar compiles JSON schemas, regular expressions and EBNF into automata over the vocabulary. A
sequence's matcher is driven by the tokens that the host knows: it catches up with them before each mask,
so preemption, resumption and rejected drafts need no bookkeeping of their own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from worker.engine.plan import ScheduledSequence
from worker.engine.sequence import Sequence


class GrammarCompiler:
    pass


@dataclass(frozen=True, slots=True)
class Masks:
    errors: dict[int, str] = field(default_factory=dict)
    complete: frozenset[int] = frozenset()

    def apply(self, logits: Tensor) -> None:
        pass


class Grammars:
    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._compiler = compiler

    def masks(self, items: Seq[ScheduledSequence]) -> Masks:
        errors = {
            i: "structured output is not available"
            for i, item in enumerate(items)
            if item.sequence.params.response_format
        }
        return Masks(errors)

    def release(self, sequence: Sequence) -> None:
        pass
