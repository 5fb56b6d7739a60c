"""Peers of `ops/bench engine`: static batching in torch, and our engine round by round."""

from pathlib import Path

import pytest

from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.rounds import of_round
from ops.benchmarks.measure.workloads import Workload, WorkloadRequest
from ops.benchmarks.peers.ours import Tokenmill
from ops.benchmarks.peers.transformers_engines import StaticBatching
from tests.engines.own.truth import tiny_models

REQUESTS = tuple(
    WorkloadRequest(tuple(range(5 + number, 9 + 2 * number)), tokens)
    for number, tokens in enumerate((6, 2, 4, 3, 5))
)


@pytest.mark.model
def test_static_batching_gives_the_same_tokens_with_empty_places(tmp_path: Path) -> None:
    options = EngineOptions(
        model=str(tiny_models.save("llama", tmp_path)), pool_tokens=1024, max_sequences=2
    )
    static, ours = StaticBatching(options), Tokenmill(options)
    measured = static.run(REQUESTS)
    assert measured.tokens == ours.run(REQUESTS).tokens
    assert measured.batch_sizes == [2, 2, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1]
    assert measured.first_s[0] == measured.first_s[1] < measured.first_s[2], (
        "a batch waits for the one before"
    )
    assert of_round(Workload("five", REQUESTS), measured)["places_used"] == pytest.approx(20 / 30)
    ours.close()
    static.close()


@pytest.mark.model
def test_a_round_does_not_hit_prompts_of_an_earlier_round(tmp_path: Path) -> None:
    ours = Tokenmill(
        EngineOptions(
            model=str(tiny_models.save("llama", tmp_path)), pool_tokens=1024, max_sequences=2
        )
    )
    for _ in range(2):
        ours.run((WorkloadRequest(tuple(range(65, 105)), 2),))
    assert ours._engine.stats().cached_tokens == 0
    ours.close()
