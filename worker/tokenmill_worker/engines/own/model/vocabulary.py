"""Reads a model's tokens, as compilers of grammars need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill_worker.engines.own.sampling.grammar.compiler import GrammarCompiler


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens as grammar compilers need them.

    `info` is xgrammar's TokenizerInfo. `encode` returns the ids of a text; the letters of special
    tokens are text too.
    """

    info: Any
    special_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]

    def compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.info, special_ids=self.special_ids, encode=self.encode)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def vocabulary(
    folder: Path, vocab_size: int, stop_token_ids: frozenset[int], trust_remote_code: bool
) -> Vocabulary | None:
    """Read the vocabulary; return None where there is no tokenizer.

    `vocab_size` is the width of the logits.
    """
    if not has_tokenizer(folder):
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


def differing_token(folder: Path, other: Path, trust_remote_code: bool) -> str | None:
    """Say which token has another id in the other folder's tokenizer; None: none, or no tokenizer.

    Tokens that were added to a vocabulary do not count: models that share one add their own.
    """
    folders = (folder, other)
    if folder == other or not all(map(has_tokenizer, folders)):
        return None
    from transformers import AutoTokenizer

    ours, theirs = (
        AutoTokenizer.from_pretrained(one, trust_remote_code=trust_remote_code) for one in folders
    )
    added, ids = ours.get_added_vocab(), theirs.get_vocab()
    differing = (
        (token, id_)
        for token, id_ in ours.get_vocab().items()
        if token not in added and ids.get(token) != id_
    )
    found = min(differing, key=lambda pair: pair[1], default=None)
    if found is None:
        return None
    return f"{found[0]!r} is token {found[1]} here, {ids.get(found[0], 'none')} there"


def _encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Return an encode function that is safe for several threads.

    The tokenizer's own `encode` sets truncation, which is shared state.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return lambda text: tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
    fast.encode_special_tokens = True  # as text
    return lambda text: fast.encode(text, add_special_tokens=False).ids
