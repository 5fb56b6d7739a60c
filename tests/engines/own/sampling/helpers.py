"""Sequences and planned items for a sampler without a scheduler, and a toy model to drive it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.cpu.kernels.draw import DrawKernel
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling import Sampler
from tokenmill_worker.engines.own.sequence import Sequence

EOS = 1
CPU = torch.device("cpu")
Proposer = Callable[[Sequence], tuple[int, ...]]
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_k=5),
    SamplingParams(min_p=0.05, top_p=0.95, top_k=60),
    SamplingParams(min_p=0.2),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, presence_penalty=1.0),
    SamplingParams(logit_bias={4: 3.0}, min_tokens=5, ignore_eos=True),
    SamplingParams(logprobs=3, top_k=50, top_p=0.8),
    SamplingParams(
        temperature=0.8, no_repeat_ngram_size=2, bad_words_ids=((7, 8), (3,)),
        sequence_bias=(((5,), 3.0), ((5, 6), -4.0)), suppress_tokens=(9,),
        begin_suppress_tokens=(10,), forced_bos_token_id=5,
    ),
)  # fmt: skip


def make_sampler(vocab_size: int, **options: object) -> Sampler:
    """Make a sampler as the CPU's runner does. With `kernel=None` torch draws, as on a device."""
    return Sampler(vocab_size, CPU, frozenset({EOS}), **{"kernel": DrawKernel(), **options})  # type: ignore[arg-type]


def make_sequence(
    params: SamplingParams,
    prompt: tuple[int, ...] = (2, 3, 4),
    output: tuple[int, ...] = (),
    seed: int = 0,
) -> Sequence:
    return Sequence("r", [*prompt, *output], len(prompt), params, seed=seed)


def plan_item(
    sequence: Sequence, drafts: tuple[int, ...] = (), forced: tuple[int, ...] = ()
) -> ScheduledSequence:
    """Plan a decode step, or the last chunk of a prefill: only the range's end matters here."""
    start = sequence.num_tokens + sequence.num_inflight - 1
    count = 1 + len(forced) + len(drafts)
    return ScheduledSequence(
        sequence, start, count, True, drafts, sequence.epoch, forced_ids=forced
    )


class ToyModel:
    """Logits that depend on the last tokens before a position: deterministic, and repetitive at low
    `spread`.
    """

    def __init__(self, vocab_size: int, memory: int = 2, spread: float = 3.0) -> None:
        self.vocab_size, self.memory, self.spread = vocab_size, memory, spread
        self._favours = torch.zeros(vocab_size)
        self.favour(self._favours)

    def favour(self, values: Tensor) -> None:
        """Change what is added to the logits `[vocab_size]` of every position; here nothing."""

    def row(self, token_ids: list[int]) -> Tensor:
        digest = hashlib.blake2b(repr(token_ids[-self.memory :]).encode(), digest_size=8).digest()
        values = np.random.default_rng(int.from_bytes(digest, "little")).normal(
            size=self.vocab_size
        )
        return torch.from_numpy((values * self.spread).astype(np.float32)) + self._favours

    def logits(self, items: list[ScheduledSequence]) -> Tensor:
        views = [
            [*item.sequence.token_ids, *item.forced_ids, *item.draft_ids[:count]]
            for item in items
            for count in range(1 + len(item.draft_ids))
        ]
        return torch.stack([self.row(view) for view in views])


def generate(
    sampler: Sampler,
    model: ToyModel,
    sequences: list[Sequence],
    num_tokens: int,
    proposer: Proposer | None = None,
) -> list[list[int]]:
    """Run sequences together until each has `num_tokens` output tokens or has drawn EOS; returns
    the outputs.
    """
    goal = {id(s): s.num_output_tokens + num_tokens for s in sequences}

    def is_done(sequence: Sequence) -> bool:
        ended = not sequence.params.ignore_eos and EOS in sequence.output_ids
        return ended or sequence.num_output_tokens >= goal[id(sequence)]

    while active := [s for s in sequences if not is_done(s)]:
        items = [plan_item(s, proposer(s) if proposer else ()) for s in active]
        sampler.prepare(items)
        tokens, _, errors = sampler.sample(model.logits(items), items).finish()
        assert not errors
        for sequence, new in zip(active, tokens, strict=True):
            for token_id in new:
                if not is_done(sequence):
                    sequence.token_ids.append(token_id)
    return [s.output_ids for s in sequences]


def draw_to_end(
    sampler: Sampler, model: ToyModel, sequence: Sequence, eos: int, limit: int = 2_000
) -> list[int]:
    """Return the output of a sequence that must end with `eos` within `limit` tokens."""
    while eos not in sequence.output_ids and sequence.num_output_tokens < limit:
        item = plan_item(sequence)
        tokens, _, errors = sampler.sample(model.logits([item]), [item]).finish()
        assert errors == {}
        sequence.token_ids += tokens[0]
    assert eos in sequence.output_ids
    return sequence.output_ids


def generate_a_step_late(
    sampler: Sampler, model: ToyModel, sequence: Sequence, num_tokens: int
) -> list[int]:
    """Return the tokens that the device draws when the host gets each one a step late.

    This is the order of asynchronous batching.
    """
    prompt = tuple(sequence.token_ids)
    ahead: list[int] = []  # the device's view; the sequence lags behind
    late = None
    for _ in range(num_tokens):
        item = plan_item(sequence)
        sampler.prepare([item])
        sampled = sampler.sample(model.row([*prompt, *ahead])[None], [item])
        ahead.append(int(sampled.token_ids[0]))
        if late is not None:
            sequence.token_ids += late.finish()[0][0]
            sequence.num_inflight -= 1
        late = sampled
        sequence.num_inflight += 1
    return ahead
