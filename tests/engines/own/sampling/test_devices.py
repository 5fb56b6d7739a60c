"""Sampling asks nothing of the device: it runs on one that has no values, and on CUDA gives the
CPU's tokens.
"""

import pytest
import torch

from tests.engines.own.sampling.helpers import EOS, KINDS, make_sampler, make_sequence, plan_item
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling import GrammarCompiler, Sampler

VOCAB = 257


def all_kinds() -> list[ScheduledSequence]:
    return [
        plan_item(make_sequence(params, output=(5, 6, 5), seed=i), drafts)
        for i, params in enumerate(
            [*KINDS, SamplingParams(top_k=3, top_p=0.5), SamplingParams(temperature=2.0)]
        )
        for drafts in ((), (7, 8))
    ]


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab([bytes([i]) for i in range(256)] + [b""], [256])


def test_sampling_reads_no_value_back_from_the_device() -> None:
    """Tensors of the "meta" device have shapes only, so an operation that waits for a value
    raises.
    """
    pytest.importorskip("xgrammar")
    device = torch.device("meta")
    sampler = Sampler(VOCAB, device, frozenset({EOS}), make_compiler())
    structured = SamplingParams(response_format=ResponseFormat(regex="[ab]+"))
    items = [*all_kinds(), plan_item(make_sequence(structured))]
    rows = sum(1 + len(item.draft_ids) for item in items)
    for _ in range(2):
        sampler.prepare(items)
        sampled = sampler.sample(torch.empty(rows, VOCAB, device=device), items)
        assert sampled.token_ids.shape == (rows,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        sampled.finish()  # which does read values: the device would have noticed
    greedy = [plan_item(make_sequence(KINDS[0]))]
    assert sampler.sample(torch.empty(1, VOCAB, device=device), greedy).token_ids.device == device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sampling_on_cuda_gives_the_cpu_s_tokens_without_waiting() -> None:
    device, vocab = torch.device("cuda"), 5_000
    items = all_kinds()
    rows = sum(1 + len(item.draft_ids) for item in items)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    on_cpu = make_sampler(vocab).sample(logits, items).finish()
    sampler = Sampler(vocab, device, frozenset({EOS}))
    there = logits.to(device)
    sampler.sample(there, items).finish()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = sampler.sample(there, items)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tokens, logprobs, errors = sampled.finish()
    assert (tokens, errors) == (on_cpu[0], on_cpu[2])
    for got, wanted in zip(logprobs, on_cpu[1], strict=True):
        assert (got is None) == (wanted is None)
        assert [e.logprob for e in got or ()] == pytest.approx(
            [e.logprob for e in wanted or ()], abs=1e-4
        )
