"""Computes the answers of Transformers' own `generate`: greedy, float32, one prompt at a time; and
how near an answer is to it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

CLEAR_GAP = 2e-3  # float noise of these models' logits is some 1e-5
LEAST_GAP = CLEAR_GAP / 4


@dataclass(frozen=True)
class Expected:
    """`gap` is the least lead of the best token over the second, in logits: float noise must stay
    far below.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    gap: float


def load(folder: Path, attention: str = "sdpa") -> transformers.PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=attention, dtype=torch.float32
        )
    model.generation_config.eos_token_id = None
    model.eval()
    return model


@torch.inference_mode()
def generate(model: transformers.PreTrainedModel, prompt: list[int], max_tokens: int) -> Expected:
    """Generate exactly max_tokens tokens: nothing ends the answer early."""
    ids = torch.tensor([prompt])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack(output.logits, dim=1)[0].topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    return Expected(tuple(prompt), tuple(output.sequences[0, len(prompt) :].tolist()), gap)


def clear_answer(
    model: transformers.PreTrainedModel, length: int, max_tokens: int, vocab: int
) -> Expected:
    """Return the answer to the first random prompt of this length without a near tie."""
    draw = random.Random(f"{length}/{max_tokens}")
    for _ in range(40):
        found = generate(model, [draw.randrange(3, vocab) for _ in range(length)], max_tokens)
        if found.gap > CLEAR_GAP:
            return found
    raise AssertionError(f"40 prompts of {length} tokens and every answer has a near tie")


@torch.inference_mode()
def lag(model: transformers.PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return by how much, in logits, a token of the answer lies below the best one, at most.

    An answer is greedy iff each of its tokens is the best one after those before it, so that it is
    `generate`'s where this is 0 but for float noise. One pass over all tokens takes a fraction of
    the time of `generate`, which reads all weights for each token.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits = model(ids, logits_to_keep=len(answer), use_cache=False).logits[0]
    chosen = logits.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
    return float((logits.amax(dim=1) - chosen).max())
