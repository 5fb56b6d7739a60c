"""Converts a GGUF file to a folder that Transformers loads: float32 safetensors, configuration,
tokenizer.

Transformers reads the file (metadata, names, dequantisation). This module only builds the model
around the tensors, without the packages that `from_pretrained(gguf_file=…)` requires.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

_PERCENT = re.compile(r"(\d{1,3})%\|")
_TOLD_EVERY = 10  # percent


def gguf_to_folder(source: Path, folder: Path, report: Callable[[float], None]) -> None:
    """Convert the file; raises ValueError where it is no causal language model that Transformers
    knows, or the package gguf is missing.

    `report` is called with the share that is done, from 0 to 1.
    """
    bars = _Bars(lambda share: report(0.1 + 0.7 * share))  # Transformers' progress bars
    with contextlib.redirect_stderr(bars), _files_read_once():
        _convert(source, folder, report)


@contextlib.contextmanager
def _files_read_once() -> Iterator[None]:
    """Keep the reader of a file while the block runs.

    Transformers opens a file for its tokenizer, its configuration and its tensors. Each time takes
    15 s of a core where the vocabulary has 262,144 tokens.
    """
    try:
        import gguf
    except ImportError:
        words = f"it takes the package gguf: {sys.executable} -m pip install gguf"
        raise ValueError(words) from None
    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = reader  # type: ignore[misc]


class _Bars(io.StringIO):
    """Swallows progress bars and reports the share that the last one shows.

    Dequantisation takes most of the time.
    """

    def __init__(self, on_share: Callable[[float], None]) -> None:
        super().__init__()
        self._on_share, self._told = on_share, 0

    def write(self, text: str) -> int:
        found = _PERCENT.findall(text)
        if found and (percent := int(found[-1])) >= self._told + _TOLD_EVERY:
            self._told = percent
            self._on_share(percent / 100)
        return len(text)


def _convert(source: Path, folder: Path, report: Callable[[float], None]) -> None:
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    report(0.05)
    config = AutoConfig.from_pretrained(**where)
    # some versions of Transformers read the tokenizer's own ids wrongly
    for role in ("bos", "eos"):
        token_id = getattr(config, f"{role}_token_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    report(0.1)
    read = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)  # type: ignore[no-untyped-call]
    report(0.8)
    model.load_state_dict(read["tensors"], strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{source.name} lacks {len(missing)} tensors, {missing[0]} among them")
    model.save_pretrained(folder)
    report(1.0)
