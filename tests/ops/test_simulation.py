"""The simulations: costs follow the roofline, the real scheduler serves a trace in virtual time, queues saturate."""

import math
import statistics
from typing import ClassVar

import pytest

from ops.benchmarks.simulate import figures, is_good
from ops.benchmarks.simulation.costs import H200, LLAMA_8B, CostModel
from ops.benchmarks.simulation.engine_run import Outcome, SimulatedEngine
from ops.benchmarks.simulation.queue_layer import Load, ScriptCosts, simulate
from ops.benchmarks.simulation.trace import Arrival, arrivals

COSTS = CostModel()


class TestCosts:
    def test_a_single_decode_reads_the_weights_once(self) -> None:
        weights = LLAMA_8B.weight_bytes / (H200.bandwidth * H200.sustained_bandwidth)
        assert COSTS.seconds(1, 1, 1) == pytest.approx(H200.overhead_s + weights, rel=1e-3)

    def test_long_prefills_are_bound_by_operations(self) -> None:
        assert COSTS.seconds(8192, 0, 0) == pytest.approx(H200.overhead_s + 8192 * 2 * 8.03e9 / (989e12 * 0.65))

    def test_keys_and_values_are_read_by_bandwidth(self) -> None:
        more = COSTS.seconds(64, 64 * 2000, 64 * 2000) - COSTS.seconds(64, 64 * 1000, 64 * 1000)
        assert more == pytest.approx(64 * 1000 * 131_072 / (4.8e12 * 0.85))


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
        assert statistics.pvariance(counts) > 5 * statistics.fmean(counts)  # a Poisson process would give 1


class TestEngine:
    SETTINGS: ClassVar[dict[str, object]] = {"policy": "fifo", "max_num_seqs": 8, "max_num_batched_tokens": 512}

    def test_one_request_takes_its_steps(self) -> None:
        engine = SimulatedEngine(COSTS, dict(self.SETTINGS))
        (outcome,) = engine.run([Arrival(1.0, 1000, 10, 0, "t")], until=60.0)
        assert engine.steps == 2 + 9  # two chunks of at most 512, the second gives the first token
        assert outcome.is_complete
        assert outcome.ttft_s == pytest.approx(
            COSTS.seconds(512, 512, 512 * 512) + COSTS.seconds(488, 1000, 488 * 1000)
        )
        assert outcome.tpot_s == pytest.approx(COSTS.seconds(1, 1005, 1005), rel=0.01)

    def test_everyone_is_served_and_time_goes_on(self) -> None:
        engine = SimulatedEngine(COSTS, dict(self.SETTINGS))
        outcomes = engine.run([Arrival(0.1 * n, 200, 20, n % 3, "t") for n in range(40)], until=math.inf)
        assert all(outcome.is_complete for outcome in outcomes)
        assert engine.busy_s <= engine.now

    def test_priority_serves_the_urgent_first_under_overload(self) -> None:
        flood = [Arrival(0.0, 2000, 50, n % 3, "t") for n in range(60)]
        waits = {}
        for policy in ("fifo", "priority"):
            outcomes = SimulatedEngine(COSTS, {**self.SETTINGS, "policy": policy}).run(flood, until=math.inf)
            waits[policy] = statistics.fmean(o.ttft_s or math.inf for o in outcomes if o.arrival.rank == 0)
        assert waits["priority"] < 0.6 * waits["fifo"]


class TestFigures:
    def outcome(self, rank: int, first_at: float | None, gap_s: float = 0.0, tokens: int = 3) -> Outcome:
        return Outcome(Arrival(0.0, 10, 3, rank, "t"), first_at, first_at, tokens, gap_s)

    def test_goodness_depends_on_the_class(self) -> None:
        assert is_good(self.outcome(0, 0.9))
        assert not is_good(self.outcome(0, 1.1))
        assert is_good(self.outcome(1, 1.1))
        assert not is_good(self.outcome(0, 0.5, gap_s=0.3))
        assert not is_good(self.outcome(0, 0.5, tokens=2)), "unfinished"
        assert is_good(self.outcome(2, 500.0, gap_s=100.0))

    def test_who_never_got_a_token_counts(self) -> None:
        found = figures([self.outcome(0, 0.5), self.outcome(0, None, tokens=0)], seconds=2.0)
        assert found["goodput"] == 0.5
        assert found["ttft_p99_s"] == math.inf


class TestQueueLayer:
    COSTS = ScriptCosts(append_call=20e-6, append_chunk=10e-6, job=200e-6)
    LOAD = Load(step_s=0.02, num_sequences=200, mean_answer=200.0)

    def test_an_idle_server_adds_its_own_time_only(self) -> None:
        result = simulate(1, self.LOAD, self.COSTS)
        service = 20e-6 + 200 * 10e-6 + 200e-6
        assert result.added_s[0] == pytest.approx(service)
        assert max(result.added_s) == pytest.approx(service)
        assert result.utilisation == pytest.approx(service / 0.02, rel=0.02)
        assert result.speed == pytest.approx(1.0, rel=0.02)

    def test_a_full_server_slows_the_workers_down(self) -> None:
        result = simulate(64, self.LOAD, self.COSTS)
        assert result.utilisation == pytest.approx(1.0, rel=0.02)
        assert result.speed == pytest.approx(0.02 / (64 * 2.22e-3), rel=0.05)

    def test_gathered_chunks_make_room(self) -> None:
        gathered = Load(0.02, 200, 200.0, tokens_per_chunk=8.0)
        assert simulate(16, gathered, self.COSTS).speed > 0.97 > simulate(16, self.LOAD, self.COSTS).speed
