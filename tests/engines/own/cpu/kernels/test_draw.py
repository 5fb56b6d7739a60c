"""The kernel draws what torch draws, on every shape of row, with any number of threads; broken rows
show.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.engines.own.cpu.instruction_sets import skip_unless_runs
from tests.engines.own.sampling.helpers import make_sampler, make_sequence, plan_item
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.cpu.kernels.draw import DrawKernel
from tokenmill_worker.engines.own.sampling import Sampled
from tokenmill_worker.engines.own.sampling.draws import SamplingArrays

WAYS = [
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for temperature, top_p, top_k, min_p in itertools.product(
        (0.0, 0.3, 1.0, 2.5), (1.0, 0.9, 0.05), (0, 1, 3, 40), (0.0, 0.02)
    )
]


def both(
    logits: torch.Tensor, ways: list[SamplingParams], seed: int = 0
) -> tuple[Sampled, Sampled]:
    items = [plan_item(make_sequence(params, seed=seed + row)) for row, params in enumerate(ways)]
    vocab = logits.shape[1]
    kernel, plain = make_sampler(vocab), make_sampler(vocab, kernel=None)
    return kernel.sample(logits.clone(), items), plain.sample(logits.clone(), items)


@pytest.mark.parametrize("vocab", [2, 7, 16, 33, 97, 5_000, 49_152])
@pytest.mark.parametrize("spread", [0.1, 2.5, 12.0])
def test_the_kernel_draws_what_torch_draws(vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(WAYS), vocab, generator=generator) * spread
    kernel, plain = both(logits, WAYS, seed=vocab)
    assert kernel.token_ids.tolist() == plain.token_ids.tolist()
    assert len(set(kernel.token_ids.tolist())) > 1


@pytest.mark.parametrize("seed", range(3))
def test_equal_and_masked_logits_are_drawn_as_by_torch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (len(WAYS), 61), generator=generator).float()
    logits[torch.rand(logits.shape, generator=generator) < 0.4] = -math.inf
    logits[:, 5] = 0.0
    kernel, plain = both(logits, WAYS, seed)
    assert kernel.token_ids.tolist() == plain.token_ids.tolist()
    assert torch.isfinite(logits.gather(1, kernel.token_ids[:, None])).all(), (
        "a masked token was drawn"
    )


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_without_finite_logits_fails_and_its_neighbours_do_not(broken: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    ways = [
        SamplingParams(),
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=4),
    ]
    fine, _ = both(logits, ways)
    logits[1, 49] = broken
    logits[3, :] = -math.inf
    found, plain = both(logits, ways)
    _, _, errors = found.finish()
    assert sorted(errors) == [1, 3] == sorted(plain.finish()[2])
    assert found.token_ids[[0, 2]].tolist() == fine.token_ids[[0, 2]].tolist()


def test_a_row_is_drawn_alike_by_any_number_of_threads_and_from_rows_with_gaps() -> None:
    wide = torch.randn(9, 700, generator=torch.Generator().manual_seed(2))
    logits = wide[:, :650]
    rows = np.arange(9)
    arrays = SamplingArrays(
        inverse_temperature=np.where(rows % 3 == 0, 0, 0.8).astype(np.float32),
        log_min_p=np.full(9, -np.inf, np.float32),
        top_p=np.where(rows % 2 == 0, 0.9, 1.0),
        top_k=np.where(rows % 4 == 0, 20, 650).astype(np.int64),
    )
    keys = np.arange(18, dtype=np.int32).reshape(9, 2) * 7919
    threads = torch.get_num_threads()
    drawn = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            tokens, peaks = DrawKernel().draw(logits, arrays, keys)
            drawn.append(tokens.tolist())
            assert peaks.tolist() == logits.amax(dim=1).tolist()
    finally:
        torch.set_num_threads(threads)
    assert drawn[0] == drawn[1] == DrawKernel().draw(logits.contiguous(), arrays, keys)[0].tolist()
    assert [drawn[0][row] for row in (0, 3, 6)] == logits.argmax(dim=1)[[0, 3, 6]].tolist()


@pytest.mark.parametrize("march", ["x86-64-v3", "x86-64"])
def test_kernels_with_narrower_vectors_draw_the_same_tokens(march: str) -> None:
    skip_unless_runs(march)
    logits = torch.randn(len(WAYS), 333, generator=torch.Generator().manual_seed(3)) * 3
    items = [plan_item(make_sequence(params, seed=row)) for row, params in enumerate(WAYS)]
    native, narrow = make_sampler(333), make_sampler(333, kernel=DrawKernel(march=march))
    assert (
        native.sample(logits, items).token_ids.tolist()
        == narrow.sample(logits, items).token_ids.tolist()
    )
