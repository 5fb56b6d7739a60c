"""GGUF → a folder that Transformers loads without further ado: float32 safetensors, configuration, tokenizer.

Transformers reads the file (metadata, names, dequantisation); this only builds the model around the
tensors, without the packages that its own `from_pretrained(gguf_file=…)` asks for.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def gguf_to_folder(source: Path, folder: Path, report: Callable[[float], None]) -> None:
    """Raises ValueError where the file is no causal language model that Transformers knows."""
    with contextlib.redirect_stderr(io.StringIO()):  # their progress bars; ours is `report`
        _convert(source, folder, report)


def _convert(source: Path, folder: Path, report: Callable[[float], None]) -> None:
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    report(0.3)
    config = AutoConfig.from_pretrained(**where)
    for role in ("bos", "eos"):  # some versions of Transformers read the tokenizer's own ids wrongly
        token_id = getattr(config, f"{role}_token_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    report(0.5)
    read = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)  # type: ignore[no-untyped-call]
    report(0.8)
    model.load_state_dict(read["tensors"], strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{source.name} lacks {len(missing)} tensors, {missing[0]} among them")
    model.save_pretrained(folder)
    report(1.0)
