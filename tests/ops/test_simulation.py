"""The simulations: costs follow the roofline, the real scheduler serves a trace in virtual time, queues saturate."""

import json
import math
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar

import pytest

from ops.benchmarks.__main__ import main
from ops.benchmarks.simulation.calibration import STORED, calibrate
from ops.benchmarks.simulation.costs import H200, LLAMA_8B, CostModel
from ops.benchmarks.simulation.engine_report import POLICIES, figures, is_good
from ops.benchmarks.simulation.engine_run import Outcome, SimulatedEngine
from ops.benchmarks.simulation.queue_layer import CUTTINGS, simulate
from ops.benchmarks.simulation.queue_report import KEPT, carried
from ops.benchmarks.simulation.queue_server import HOP_S, Clock, QueueServer
from ops.benchmarks.simulation.queue_worker import LEASE_S, Mix
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


class TestQueueServer:
    def test_calls_are_served_in_order_of_arrival_by_one_thread(self) -> None:
        clock = Clock()
        ends: list[float] = []
        server = QueueServer(clock, measured_from=0.0, measured_to=10.0)
        for seconds in (0.5, 0.25):
            server.call("x", seconds, ends.append)
        clock.run(until=10.0)
        assert ends == pytest.approx([HOP_S + 0.5, HOP_S + 0.75])
        assert server.busy == {"x": 0.75}


class TestQueueLayer:
    MIX = Mix("a mix", 64, 220, num_sequences=100)
    COSTS = replace(STORED, append=20e-6, chunk={"token chunks": 10e-6, "chunks of 8": 10e-6, "checkpoints": 10e-6})

    def test_beside_an_idle_server_the_devices_do_what_they_can(self) -> None:
        result = simulate(1, self.MIX, CUTTINGS[0], self.COSTS)
        assert result.speed == pytest.approx(1.0, rel=0.05)
        assert result.times_ms()["added_p50_ms"] == pytest.approx(1e3 * (HOP_S + 20e-6 + 100 * 10e-6), rel=0.3)
        assert result.busy["append"] == pytest.approx(result.tokens_s * (20e-6 / 100 + 10e-6), rel=0.05)
        assert result.jobs_s * 190 == pytest.approx(result.tokens_s, rel=0.2), "what begins ends"

    def test_a_full_server_is_what_limits(self) -> None:
        one, many = (simulate(workers, self.MIX, CUTTINGS[0], self.COSTS, seconds=2.0) for workers in (1, 48))
        assert many.utilisation == pytest.approx(1.0, rel=0.02)
        assert many.speed < 0.7
        assert many.times_ms()["claim_p99_ms"] > 10 * one.times_ms()["claim_p99_ms"]
        assert many.times_ms()["heartbeat_p99_ms"] < 1e3 * LEASE_S, "or the workers would lose their jobs"

    def test_steps_that_pile_up_share_chunks(self) -> None:
        full = simulate(16, self.MIX, CUTTINGS[0], self.COSTS, seconds=4.0)
        assert full.tokens_s > 200_000, "10 µs a chunk, were each token one"
        assert full.tokens_s == pytest.approx(full.jobs_s * 190, rel=0.2), "no token is lost in the sharing"

    def test_gathered_chunks_make_room(self) -> None:
        each, gathered = (simulate(8, self.MIX, cutting, self.COSTS, seconds=4.0) for cutting in CUTTINGS[:2])
        assert gathered.speed > 0.97
        assert gathered.busy["append"] < each.busy["append"] / 2
        assert gathered.tokens_s == pytest.approx(gathered.jobs_s * 190, rel=0.2), "no token is lost in the cutting"

    def test_carried_is_where_speed_falls(self) -> None:
        results = [simulate(workers, self.MIX, CUTTINGS[0], self.COSTS, seconds=2.0) for workers in (1, 16)]
        limit = carried(self.MIX, CUTTINGS[0], self.COSTS, results)
        assert simulate(limit, self.MIX, CUTTINGS[0], self.COSTS).speed >= KEPT
        assert simulate(limit + 2, self.MIX, CUTTINGS[0], self.COSTS).speed < KEPT


@pytest.mark.redis
def test_costs_are_measured_on_the_real_server() -> None:
    costs = calibrate(rounds=1)
    assert set(costs.chunk) == {cutting.name for cutting in CUTTINGS}
    for name, seconds in asdict(costs).items():
        for each in seconds.values() if isinstance(seconds, dict) else (seconds,):
            assert 0 <= each < 0.01, name
    assert min(costs.chunk.values()) > 0 < costs.submit


def test_the_command_writes_both_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["simulate", "--part", "engine", "--load", "0.5", "--seconds", "3", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["engine"]["rows"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    printed = capsys.readouterr().out
    assert "H200" in printed
    assert max(map(len, printed.splitlines())) <= 80
