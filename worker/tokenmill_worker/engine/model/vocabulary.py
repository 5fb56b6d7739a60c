"""Reads a model's tokens, as compilers of grammars need them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens as grammar compilers need them.

    `info` is xgrammar's TokenizerInfo. `encode` returns the ids of a text without special tokens.
    """

    info: Any
    special_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]


def vocabulary(
    folder: Path, vocab_size: int, stop_token_ids: frozenset[int], trust_remote_code: bool
) -> Vocabulary | None:
    """Read the vocabulary; return None where there is no tokenizer or no xgrammar.

    `vocab_size` is the width of the logits.
    """
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    if not has_tokenizer or importlib.util.find_spec("xgrammar") is None:
        return None
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(stop_token_ids) or None
    )
    # `all_special_ids` lacks special tokens that have no role, such as the marks of tool calls
    added = (id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special)
    special = sorted({*tokenizer.all_special_ids, *added})
    return Vocabulary(info, tuple(special), _encoder(tokenizer))


def _encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Return an encode function that is safe for several threads.

    The tokenizer's own `encode` sets truncation, which is shared state.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return lambda text: tokenizer.encode(text, add_special_tokens=False)
    return lambda text: fast.encode(text, add_special_tokens=False).ids
