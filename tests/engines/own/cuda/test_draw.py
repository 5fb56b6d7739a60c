"""The kernel that draws on a device against torch's way: the same floor, the same noise, the same
tokens.

Runs where there is CUDA, or where this process interprets Triton: test_interpreted starts one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engines.own.sampling.helpers import make_sequence, plan_item
from tokenmill_schemas.generation import LOGPROBS_MODES, SamplingParams
from tokenmill_worker.engines.own.sampling import Sampler
from tokenmill_worker.engines.own.sampling.draws import SamplingArrays
from tokenmill_worker.engines.own.sampling.noise import gumbel_costs, race, row_keys
from tokenmill_worker.engines.own.sampling.truncation import TruncationLimits, draw_sorted

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tokenmill_worker.engines.own.cuda import draw, draw_cut
from tokenmill_worker.engines.own.cuda.attention.triton import is_interpreted
from tokenmill_worker.engines.own.cuda.draw import DeviceDraw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(
        DEVICE.type == "cpu" and not is_interpreted(), reason="neither CUDA nor interpreted"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]
OFF = -np.inf


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter work on small tiles, and numpy sort: Triton's network takes seconds."""
    if is_interpreted():
        monkeypatch.setattr(draw, "CHUNK", 256)
        monkeypatch.setattr(draw, "TILE", 512)
        monkeypatch.setattr(tl, "sort", sort)


def sort(values: tl.tensor) -> tl.tensor:
    handle = TensorHandle(np.sort(values.handle.data), values.handle.dtype)
    return tl.tensor(handle, values.type)


def drawing(rows: list[tuple[float, int, float, float]]) -> SamplingArrays:
    """Rows of (temperature, top_k, top_p, log_min_p)."""
    temperature, top_k, top_p, log_min_p = (np.array(column) for column in zip(*rows, strict=True))
    inverse = np.where(temperature == 0, 0.0, 1.0 / np.where(temperature == 0, 1.0, temperature))
    return SamplingArrays(
        inverse.astype(np.float32),
        log_min_p.astype(np.float32),
        top_p.astype(float),
        top_k.astype(np.int64),
    )


def by_torch(logits: Tensor, wanted: SamplingArrays, keys: np.ndarray) -> list[int]:
    vocab = logits.shape[1]
    inverse = torch.from_numpy(wanted.inverse_temperature)[:, None]
    scaled = (logits - logits.amax(dim=1, keepdim=True)) * inverse
    limits = TruncationLimits(
        torch.from_numpy(wanted.top_k)[:, None], torch.from_numpy(wanted.top_p)[:, None],
        torch.from_numpy(wanted.log_min_p)[:, None], max_top_k=0, bounded=False,
    )  # fmt: skip
    drawn = draw_sorted(
        scaled, limits, torch.from_numpy(keys), torch.arange(vocab, dtype=torch.int32)
    )
    return torch.where(inverse[:, 0] == 0, logits.argmax(dim=1), drawn).tolist()


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


KINDS = {
    "greedy": (0.0, 300, 1.0, OFF),
    "plain": (1.0, 300, 1.0, OFF),
    "hot": (2.5, 300, 1.0, OFF),
    "top-k": (1.0, 5, 1.0, OFF),
    "top-p": (1.0, 300, 0.7, OFF),
    "min-p": (1.3, 300, 1.0, float(np.log(0.1))),
    "all": (0.8, 40, 0.9, float(np.log(0.02))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_parameters_draws_torch_s_tokens(kind: str) -> None:
    logits, keys = random_logits(8, 300), row_keys(np.arange(8, dtype=np.uint64), np.arange(8) + 5)
    wanted = drawing([KINDS[kind]] * 8)
    tokens, peaks = DeviceDraw(DEVICE).draw(logits.to(DEVICE), wanted, keys)
    assert tokens.tolist() == by_torch(logits, wanted, keys)
    assert torch.equal(peaks.cpu(), logits.amax(dim=1))


def test_a_row_draws_the_same_token_in_a_mixed_batch_as_alone() -> None:
    """Equal logits stay or go together; a row's token does not depend on its batch."""
    logits = random_logits(7, 300, seed=1).round()
    keys = row_keys(np.arange(7, dtype=np.uint64) + 50, np.arange(7))
    wanted = drawing(list(KINDS.values()))
    drawer = DeviceDraw(DEVICE)
    tokens, _ = drawer.draw(logits.to(DEVICE), wanted, keys)
    assert tokens.tolist() == by_torch(logits, wanted, keys)
    for row, kind in enumerate(KINDS.values()):
        alone, _ = drawer.draw(
            logits[row : row + 1].to(DEVICE), drawing([kind]), keys[row : row + 1]
        )
        assert alone.tolist() == tokens[row : row + 1].tolist()


@pytest.mark.parametrize(
    ("logits", "search", "is_found"),
    [
        ("normal", (8, 1.0, OFF), True),
        ("normal", (8, 0.6, OFF), True),
        ("normal", (300, 0.99, OFF), False),  # more than there are candidates
        ("normal", (1000, 0.05, OFF), True),
        ("normal", (1000, 0.999, OFF), False),
        ("normal", (500, 0.9, float(np.log(0.5))), True),  # min-p keeps candidates alone
        ("flat", (1000, 0.4, float(np.log(1e-4))), False),
        ("two peaks", (8, 0.6, OFF), False),  # more candidates than a tile holds
        ("masked", (300, 0.99, OFF), True),  # all that is left is a candidate
        ("equal", (8, 0.9, OFF), True),
    ],
)
def test_the_floor_is_exact_at_any_rank_among_the_logits(
    logits: str,
    search: tuple[int, float, float],
    is_found: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some 64 of 1,000 logits are candidates; where they are enough, the row is not searched."""
    monkeypatch.setattr(draw, "TILE", 256)
    monkeypatch.setattr(draw, "CANDIDATES", 64)
    draw.deviations_of_cut.cache_clear()
    rows = random_logits(2, 1000, seed=7)
    if logits == "flat":
        rows /= 1000
    elif logits == "two peaks":
        rows[:, ::2] += 40
    elif logits == "masked":
        rows[:, 30:] = -torch.inf
    elif logits == "equal":
        rows = rows.round()
    wanted = drawing([(0.9, *search)] * 2)
    keys = row_keys(np.arange(2, dtype=np.uint64), np.arange(2) + 11)
    with searched_rows(monkeypatch) as searched:
        tokens, _ = DeviceDraw(DEVICE).draw(rows.to(DEVICE), wanted, keys)
    draw.deviations_of_cut.cache_clear()
    assert tokens.tolist() == by_torch(rows, wanted, keys)
    if is_interpreted():
        assert len(searched) == (0 if is_found else 2)


@contextmanager
def searched_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Count the rows that are searched; only the interpreter tells."""
    searched: list[None] = []
    own = draw_cut.floor_of_row

    def floor_of_row(*arguments: object) -> object:
        searched.append(None)
        return own(*arguments)

    with monkeypatch.context() as patch:
        if is_interpreted():
            patch.setattr(draw_cut, "floor_of_row", floor_of_row)
        yield searched


def test_a_vocabulary_of_several_chunks_draws_torch_s_tokens() -> None:
    """The first of equal logits in different chunks wins a greedy row."""
    vocab = 2 * draw.CHUNK + 100
    logits, keys = (
        random_logits(4, vocab),
        row_keys(np.arange(4, dtype=np.uint64), np.arange(4) + 9),
    )
    logits[0, [70, draw.CHUNK + 3, 2 * draw.CHUNK + 5]] = 50.0
    logits[1, [draw.CHUNK + 9, 2 * draw.CHUNK + 5]] = 50.0
    wanted = drawing(
        [
            (0.0, vocab, 1.0, OFF),
            (0.0, vocab, 1.0, OFF),
            (1.0, vocab, 1.0, OFF),
            (0.8, 40, 0.9, OFF),
        ]
    )
    tokens, peaks = DeviceDraw(DEVICE).draw(logits.to(DEVICE), wanted, keys)
    assert tokens.tolist() == by_torch(logits, wanted, keys)
    assert tokens[:2].tolist() == [70, draw.CHUNK + 9]
    assert torch.equal(peaks.cpu(), logits.amax(dim=1))


# the interpreter's numpy, of infinities
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_without_a_finite_logit_are_found_by_their_peak() -> None:
    logits = random_logits(4, 100)
    logits[0, 7], logits[1, :], logits[2, 3] = torch.nan, -torch.inf, torch.inf
    tokens, peaks = DeviceDraw(DEVICE).draw(
        logits.to(DEVICE),
        drawing([KINDS["all"]] * 4),
        row_keys(np.zeros(4, np.uint64), np.arange(4)),
    )
    assert torch.isfinite(peaks).tolist() == [False, False, False, True]
    assert all(0 <= token < 100 for token in tokens.tolist())


def test_a_masked_token_is_never_drawn() -> None:
    logits = random_logits(16, 200)
    logits[:, :150] = -torch.inf
    keys = row_keys(np.arange(16, dtype=np.uint64), np.arange(16))
    tokens, _ = DeviceDraw(DEVICE).draw(
        logits.to(DEVICE), drawing([(3.0, 200, 0.99, OFF)] * 16), keys
    )
    assert min(tokens.tolist()) >= 150


def test_the_kernel_s_noise_equals_torch_s() -> None:
    """Equal logits leave the race to the noise alone; its winner is torch's, for many keys."""
    keys = row_keys(np.arange(64, dtype=np.uint64), np.arange(64) * 31)
    flat = torch.zeros(64, 500)
    tokens, _ = DeviceDraw(DEVICE).draw(flat.to(DEVICE), drawing([(1.0, 500, 1.0, OFF)] * 64), keys)
    ids = torch.arange(500, dtype=torch.int32)
    assert tokens.tolist() == gumbel_costs(torch.from_numpy(keys), ids).argmin(dim=1).tolist()
    assert tokens.tolist() == race(flat, torch.from_numpy(keys), ids).tolist()


def test_raw_and_processed_log_probabilities_equal_torch_s() -> None:
    logits = random_logits(8, 300, 5)
    modes = [
        SamplingParams(logprobs=3, logprobs_mode=mode, **kind)  # type: ignore[arg-type]
        for mode in LOGPROBS_MODES
        for kind in (
            {"temperature": 0.0},
            {"temperature": 0.5},
            {"temperature": 0.8, "top_p": 0.7, "top_k": 40},
            {"temperature": 1.3, "min_p": 0.1, "repetition_penalty": 1.4},
        )
    ]
    results = []
    for kernel in (DeviceDraw(DEVICE), None):
        sampler = Sampler(300, DEVICE, frozenset({1}), kernel=kernel)
        items = [plan_item(make_sequence(params, seed=i)) for i, params in enumerate(modes)]
        results.append(sampler.sample(logits.to(DEVICE), items).finish())
    (drawn, scores, _), (expected, expected_scores, _) = results
    assert drawn == expected
    for got, wanted in zip(scores, expected_scores, strict=True):
        assert got is not None
        assert wanted is not None
        assert got[0].logprob == pytest.approx(wanted[0].logprob, abs=1e-6)
        assert [token for token, _ in got[0].top] == [token for token, _ in wanted[0].top]
