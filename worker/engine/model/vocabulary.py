"""What each token id stands for, as xgrammar wants it: read through Transformers' tokenizer, once, at the start."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def tokenizer_info(folder: Path, vocab_size: int, stop_token_ids: frozenset[int], trust_remote_code: bool) -> Any:
    """xgrammar's TokenizerInfo; None where there is no tokenizer or no xgrammar. `vocab_size` is the logits' width."""
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    if not has_tokenizer or importlib.util.find_spec("xgrammar") is None:
        return None
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(stop_token_ids) or None
    )
