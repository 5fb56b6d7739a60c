"""The counter-based noise: its definition, its distribution, its independence of how it is
computed.
"""

import math

import numpy as np
import pytest
import torch

from tokenmill_worker.engines.own.sampling import noise

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def costs(seeds: list[int], positions: list[int], tokens: int) -> torch.Tensor:
    keys = noise.row_keys(np.array(seeds, np.uint64), np.array(positions, np.int64))
    return noise.gumbel_costs(torch.from_numpy(keys), torch.arange(tokens, dtype=torch.int32))


def exact_cost(seed: int, position: int, token: int) -> float:
    """Compute the same hash in Python's unbounded integers."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) & MASK64) + (position + 1) * golden) & MASK64)
    x = (token * 0x9E3779B1 & MASK32) ^ (key & MASK32)
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK32
    x ^= x >> 15
    x ^= key >> 32
    x = x * 0x846CA68B & MASK32
    x ^= x >> 16
    return math.log(-math.log1p(-((x & 0x7FFFFFFF) + 0.5) / 2**31))


def test_the_hash_equals_its_definition_in_wrapping_integers() -> None:
    seeds, positions = [0, 1, 7, MASK64, 1 << 63], [0, 5, 100_000, 3, 2**31]
    got = costs(seeds, positions, 300)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in (0, 1, 2, 150, 299):
            assert got[row, token].item() == pytest.approx(
                exact_cost(seed, position, token), abs=2e-5
            )


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])
def test_costs_are_distributed_as_logs_of_exponentials_along_every_counter(axis: str) -> None:
    from scipy import stats  # takes a second, in each test process

    count = 40_000
    if axis == "tokens":
        sample = costs([3], [9], count)[0]
    elif axis == "positions":
        sample = costs([3] * count, list(range(count)), 8)[:, 5]
    else:
        sample = costs(list(range(count)), [4] * count, 8)[:, 5]
    assert stats.kstest(sample.double().exp().numpy(), "expon").pvalue > 1e-3


@pytest.mark.parametrize(
    ("seeds", "positions"), [([1, 2], [0, 0]), ([1, 1], [0, 1]), ([0, 1 << 32], [7, 7])]
)
def test_rows_of_neighbouring_counters_are_independent(
    seeds: list[int], positions: list[int]
) -> None:
    from scipy import stats  # takes a second, in each test process

    first, second = costs(seeds, positions, 60_000).double().exp().neg().exp().numpy()  # uniform
    table, _, _ = np.histogram2d(first, second, bins=12)
    assert stats.chi2_contingency(table).pvalue > 1e-3
    shifted, _, _ = np.histogram2d(first[:-1], second[1:], bins=12)
    assert stats.chi2_contingency(shifted).pvalue > 1e-3


def test_the_only_possible_token_always_wins_and_rare_tokens_can_win() -> None:
    scaled = torch.full((2, 3), -torch.inf)
    scaled[:, 2] = 0.0
    keys = torch.from_numpy(noise.row_keys(np.arange(2, dtype=np.uint64), np.zeros(2, np.int64)))
    assert noise.race(scaled, keys, torch.arange(3, dtype=torch.int32)).tolist() == [2, 2]
    lowest = costs(list(range(200)), [0] * 200, 50_000).min().item()
    assert lowest < math.log(1e-6)
    assert math.isfinite(lowest)


def test_the_winner_is_the_same_by_chunks_by_rows_and_among_gathered_candidates() -> None:
    torch.manual_seed(0)
    scaled = torch.randn(7, 50_000)
    keys = torch.from_numpy(
        noise.row_keys(np.arange(7, dtype=np.uint64), np.arange(7, dtype=np.int64))
    )
    vocabulary = torch.arange(50_000, dtype=torch.int32)
    together = noise.race(scaled, keys, vocabulary)  # chunks of five rows
    alone = torch.cat(
        [noise.race(scaled[i : i + 1], keys[i : i + 1], vocabulary) for i in range(7)]
    )
    order = torch.argsort(torch.rand(7, 50_000), dim=1)
    shuffled = noise.race(scaled.gather(1, order), keys, order.to(torch.int32))
    assert (
        together.tolist()
        == alone.tolist()
        == order.gather(1, shuffled[:, None]).squeeze(1).tolist()
    )
