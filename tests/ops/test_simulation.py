"""The simulation: costs follow the roofline, the real scheduler serves a trace in virtual time;
calls of a queue server are counted.
"""

import json
import math
import statistics
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar

import pytest

from ops.benchmarks.__main__ import main
from ops.benchmarks.commands.simulate import (
    CACHE_TOKENS,
    PREEMPTION,
    compare,
    short_of_memory,
)
from ops.benchmarks.simulation import costs
from ops.benchmarks.simulation.engine import RequestTimes, SimulatedEngine
from ops.benchmarks.simulation.load import Arrival, arrivals
from ops.benchmarks.simulation.queue_load import (
    ANSWERS,
    MIXES,
    Mix,
    ScriptCosts,
    mean_answer,
    server_s,
    tokens_s,
)
from tokenmill_worker.consume.consumer import MAX_AT_ONCE
from tokenmill_worker.publish.chunker import MOST_TOGETHER


class TestCosts:
    def test_a_single_decode_reads_the_weights_once(self) -> None:
        weights = 2 * costs.SHAPE.num_weights / (0.85 * 4.8e12)
        assert costs.seconds(1, 1, 1, 1) == pytest.approx(costs.OVERHEAD_S + weights, rel=1e-3)

    def test_long_prefills_are_bound_by_operations(self) -> None:
        body = costs.SHAPE.num_weights - 4096 * 128_256
        head_s = 2 * 4096 * 128_256 / (0.85 * 4.8e12)
        assert costs.seconds(8192, 1, 0, 0) == pytest.approx(
            costs.OVERHEAD_S + 8192 * 2 * body / (0.65 * 989e12) + head_s
        )

    def test_keys_and_values_are_read_by_bandwidth(self) -> None:
        few, many = (costs.seconds(64, 64, 64 * each, 64 * each) for each in (1000, 2000))
        assert many - few == pytest.approx(64 * 1000 * 131_072 / (0.85 * 4.8e12))


class TestTrace:
    def test_rate_and_seed(self) -> None:
        trace = arrivals(20.0, 300.0)
        assert len(trace) == pytest.approx(6000, rel=0.05)
        assert trace == arrivals(20.0, 300.0)
        assert trace != arrivals(20.0, 300.0, seed=1)
        assert [arrival.at for arrival in trace] == sorted(arrival.at for arrival in trace)

    def test_arrivals_come_in_bursts(self) -> None:
        counts = [0] * 60
        for arrival in arrivals(20.0, 300.0):
            counts[int(arrival.at // 5)] += 1
        assert statistics.pvariance(counts) > 5 * statistics.fmean(
            counts
        )  # a Poisson process would give 1


class TestEngine:
    SETTINGS: ClassVar[dict[str, object]] = {
        "policy": "fifo",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
    }

    def test_one_request_takes_its_steps(self) -> None:
        engine = SimulatedEngine(dict(self.SETTINGS))
        (outcome,) = engine.run([Arrival(1.0, 1000, 10, 0, "t")])
        assert engine.steps == 2 + 9  # two chunks of at most 512, the second gives the first token
        assert outcome.num_tokens == 10
        assert outcome.ttft_s == pytest.approx(
            costs.seconds(512, 0, 512, 512 * 512) + costs.seconds(488, 1, 1000, 488 * 1000)
        )

    def test_everyone_is_served_and_time_goes_on(self) -> None:
        engine = SimulatedEngine(dict(self.SETTINGS))
        outcomes = engine.run([Arrival(0.1 * n, 200, 20, n % 3, "t") for n in range(40)])
        assert all(outcome.num_tokens == 20 for outcome in outcomes)
        assert engine.now > 3.9, "the last one came then"

    def test_priority_serves_the_urgent_first_under_overload(self) -> None:
        flood = [Arrival(0.0, 2000, 50, n % 3, "t") for n in range(60)]
        waits = {}
        for policy in ("fifo", "priority"):
            outcomes = SimulatedEngine({**self.SETTINGS, "policy": policy}).run(flood)
            waits[policy] = statistics.fmean(o.ttft_s for o in outcomes if o.arrival.rank == 0)
        assert waits["priority"] < 0.6 * waits["fifo"]


def test_goodness_depends_on_the_class() -> None:
    def is_good(rank: int, first_at: float, gap_s: float = 0.0) -> bool:
        return RequestTimes(Arrival(0.0, 10, 3, rank, "t"), first_at, first_at, 3, gap_s).is_good

    assert is_good(0, 0.9)
    assert not is_good(0, 1.1)
    assert is_good(1, 1.1)
    assert not is_good(0, 0.5, gap_s=0.3)
    assert is_good(2, 500.0, gap_s=100.0)


class TestQueueLoad:
    FREE = ScriptCosts(*[0.0] * len(fields(ScriptCosts)))
    MIX, TOKEN = MIXES["short prompts"], ANSWERS["a chunk per token"]

    def test_a_device_gives_a_token_to_each_place_in_a_step(self) -> None:
        lone = Mix(prompt_tokens=0, context=220, num_sequences=64)
        step_s = costs.seconds(64, 64, 64 * 220, 64 * 220)
        assert tokens_s(lone) == pytest.approx(64 / step_s)
        assert tokens_s(replace(lone, prompt_tokens=64)) < tokens_s(lone), "prompts take time too"

    def test_tokens_share_chunks_where_the_server_is_full(self) -> None:
        prices = replace(self.FREE, chunk=10e-6, checkpoint=32e-6)
        rate = tokens_s(self.MIX)
        each, shared = (
            server_s(self.MIX, self.TOKEN, prices, is_full=full) for full in (False, True)
        )
        assert each == pytest.approx(10e-6 * rate)
        assert shared == pytest.approx(10e-6 * rate / MOST_TOGETHER)
        checkpoints = server_s(self.MIX, ANSWERS["checkpoints"], prices, is_full=True)
        assert checkpoints == pytest.approx(1e-6 * rate)

    def test_a_full_server_claims_in_groups(self) -> None:
        prices = replace(self.FREE, claim=MAX_AT_ONCE * 1e-6, claimed=2e-6)
        jobs = tokens_s(self.MIX) / mean_answer()
        assert server_s(self.MIX, self.TOKEN, prices, is_full=True) == pytest.approx(3e-6 * jobs)
        assert server_s(self.MIX, self.TOKEN, prices, is_full=False) == pytest.approx(
            (MAX_AT_ONCE + 2) * 1e-6 * jobs
        )


def test_a_short_cache_preempts_and_every_answer_is_complete() -> None:
    trace = short_of_memory(0)["64 long prompts beside 64 short"][:24]
    cases = {name: PREEMPTION[name] for name in ("margin 0", "margin 0.2")}
    found = compare(trace, cases, cache_tokens=CACHE_TOKENS)
    assert found["margin 0"]["preemptions"] > found["margin 0.2"]["preemptions"] == 0
    assert all(figures["ttft_p99_s"] < math.inf for figures in found.values())


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["simulate", "--part", "queue", "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [list(cases) for cases in results.values()] == [list(ANSWERS)] * len(MIXES)
    printed = capsys.readouterr().out
    assert "workers" in printed
    assert max(map(len, printed.splitlines())) <= 80
