"""The simulations: costs follow the roofline, the real scheduler serves a trace in virtual time,
queues saturate.
"""

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
from ops.benchmarks.simulation.queue_claims import POLL_S, Claims
from ops.benchmarks.simulation.queue_layer import simulate
from ops.benchmarks.simulation.queue_load import (
    CUTTINGS,
    EIGHTS,
    INTERACTIVE,
    TOKENS,
    Cutting,
    Mix,
    Observations,
)
from ops.benchmarks.simulation.queue_log import Log, Steps, in_parts, num_chunks, together
from ops.benchmarks.simulation.queue_report import KEPT, carried
from ops.benchmarks.simulation.queue_server import HOP_S, Clock, QueueServer
from ops.benchmarks.simulation.queue_worker import LEASE_S
from ops.benchmarks.simulation.trace import Arrival, arrivals
from tests.publish.support import FakeLog, admit, event
from tokenmill_worker.consume.consumer import MAX_AT_ONCE
from tokenmill_worker.publish.fair_batches import EVENTS_AT_ONCE, split_batches
from tokenmill_worker.publish.publisher import Publisher

COSTS = CostModel()


class TestCosts:
    def test_a_single_decode_reads_the_weights_once(self) -> None:
        weights = LLAMA_8B.weight_bytes / (H200.bandwidth * H200.sustained_bandwidth)
        assert COSTS.seconds(1, 1, 1) == pytest.approx(H200.overhead_s + weights, rel=1e-3)

    def test_long_prefills_are_bound_by_operations(self) -> None:
        assert COSTS.seconds(8192, 0, 0) == pytest.approx(
            H200.overhead_s + 8192 * 2 * 8.03e9 / (989e12 * 0.65)
        )

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
        outcomes = engine.run(
            [Arrival(0.1 * n, 200, 20, n % 3, "t") for n in range(40)], until=math.inf
        )
        assert all(outcome.is_complete for outcome in outcomes)
        assert engine.busy_s <= engine.now

    def test_priority_serves_the_urgent_first_under_overload(self) -> None:
        flood = [Arrival(0.0, 2000, 50, n % 3, "t") for n in range(60)]
        waits = {}
        for policy in ("fifo", "priority"):
            outcomes = SimulatedEngine(COSTS, {**self.SETTINGS, "policy": policy}).run(
                flood, until=math.inf
            )
            waits[policy] = statistics.fmean(
                o.ttft_s or math.inf for o in outcomes if o.arrival.rank == 0
            )
        assert waits["priority"] < 0.6 * waits["fifo"]


class TestFigures:
    def outcome(
        self, rank: int, first_at: float | None, gap_s: float = 0.0, tokens: int = 3
    ) -> Outcome:
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


class TestClaims:
    COSTS = replace(STORED, claim=1e-3, claimed=0.0)

    def begin(self, room: int) -> None:
        """Start one worker with that many free places, which never get more."""
        self.clock, self.room = Clock(), room
        self.taken: list[tuple[float, int]] = []
        self.server = QueueServer(self.clock, measured_from=0.0, measured_to=math.inf)
        self.worker = Claims(
            self.server, self.COSTS, Observations(0.0), lambda: self.room, self.take
        )

    def take(self, count: int) -> None:
        self.room -= count
        self.taken.append((self.clock.now, count))

    @property
    def num_claims(self) -> int:
        return round(self.server.busy["claim"] / self.COSTS.claim)

    def test_a_claim_that_filled_the_places_is_the_last(self) -> None:
        self.begin(room=MAX_AT_ONCE + 8)
        self.worker.wait()
        self.clock.run(until=POLL_S / 2)
        assert [count for _, count in self.taken] == [MAX_AT_ONCE, 8]
        assert self.num_claims == 2, "none that asks for nothing"

    def test_room_is_claimed_for_when_it_is_noticed_and_one_call_is_under_way(self) -> None:
        self.begin(room=3)
        self.worker.wait()
        self.clock.run(until=HOP_S)
        self.room += 2
        self.worker.notice_room()  # the first is under way: asked for behind it
        self.clock.run(until=0.1)
        self.room += 1
        self.clock.run(until=0.2)
        self.worker.notice_room()
        self.clock.run(until=0.3)
        claim = 2 * HOP_S + self.COSTS.claim
        assert [count for _, count in self.taken] == [3, 2, 1]
        assert [at for at, _ in self.taken] == pytest.approx([claim, 2 * claim, 0.2 + claim])
        assert self.num_claims == 3

    def test_where_nothing_makes_room_it_looks_once_per_poll_interval(self) -> None:
        self.begin(room=0)
        self.worker.wait()
        self.clock.run(until=3.5 * POLL_S)
        assert (self.num_claims, self.taken) == (3, [])

    def test_no_claim_of_a_busy_worker_comes_back_empty(self) -> None:
        result = simulate(1, TestQueueLayer.MIX, TOKENS, self.COSTS, seconds=10.0)
        assert result.busy["claim"] * 10.0 / self.COSTS.claim == pytest.approx(
            len(result.claims_s), abs=1
        )


class TestLog:
    """The simulation cuts a backlog of events into parts and chunks as the product does."""

    COSTS = replace(STORED, append=1.0, chunk={1: 1.0, 8: 1.0, 32: 1.0}, opened=3.0)

    def step(self, jobs: int, opened: int = 0) -> Steps:
        return Steps((0.0,), jobs, jobs, tokens=jobs, chunks=jobs, opened=opened, ended=0)

    @pytest.mark.parametrize(("jobs", "steps"), [(256, 3), (100, 3), (100, 300), (300, 1), (7, 1)])
    def test_parts_are_those_of_the_service(self, jobs: int, steps: int) -> None:
        parts = in_parts(together([self.step(jobs)] * steps), 256)
        events = [event("a", job_id=str(number)) for _ in range(steps) for number in range(jobs)]
        assert [part.events for part in parts] == [
            len(part) for part in split_batches(events, (), 256)
        ]
        assert sum(part.tokens for part in parts) == jobs * steps, "no token is lost in the cutting"

    @pytest.mark.parametrize("cutting", [TOKENS, INTERACTIVE])
    @pytest.mark.parametrize(
        ("sequences", "steps"), [(256, 4), (250, 2), (100, 3), (16, 20), (1, 40)]
    )
    async def test_chunks_are_as_many_as_the_publishers(
        self, cutting: Cutting, sequences: int, steps: int
    ) -> None:
        log = FakeLog()
        publisher = Publisher(log)
        names = [str(number) for number in range(sequences)]
        for name in names:
            publisher.open(await admit(name))
        await publisher.handle([event("a", job_id=name) for name in names])
        log.calls.clear()
        events = [event("b", job_id=name) for name in names * steps]
        urgent = {each.request_id for each in events} if cutting.is_urgent else set()
        for part in split_batches(events, urgent, max(EVENTS_AT_ONCE, sequences)):
            await publisher.handle(part)
        made = together([self.step(sequences)] * steps)
        parts = [made] if cutting.is_urgent else in_parts(made, max(EVENTS_AT_ONCE, sequences))
        assert [num_chunks(part, cutting) for part in parts] == [len(call) for call in log.calls]

    def test_ends_leave_with_their_part_and_room_is_noticed_behind_the_last(self) -> None:
        clock, told = Clock(), list[object]()
        server = QueueServer(clock, measured_from=0.0, measured_to=math.inf)
        log = Log(
            server,
            self.COSTS,
            Observations(0.0),
            TOKENS,
            256,
            told.append,
            lambda: told.append("room"),
        )
        for opened in (0, 256, 0, 0, 0):  # the first goes alone, the others pile up meanwhile
            log.add(replace(self.step(256, opened), ended=2))
        clock.run(until=math.inf)
        assert told == [2, "room", 4, 4, "room"]
        assert server.busy["append"] == pytest.approx(3 * 1.0 + 256 * 1.0 + 256 * 3.0), (
            "a job's first is dearer"
        )


class TestQueueLayer:
    MIX = Mix("a mix", 64, 220, num_sequences=100)
    COSTS = replace(STORED, append=20e-6, chunk={1: 10e-6, 8: 31e-6, 32: 31e-6}, opened=10e-6)

    def test_beside_an_idle_server_the_devices_do_what_they_can(self) -> None:
        result = simulate(1, self.MIX, TOKENS, self.COSTS)
        assert result.speed == pytest.approx(1.0, rel=0.05)
        assert result.times_ms()["added_p50_ms"] == pytest.approx(
            1e3 * (HOP_S + 20e-6 + 100 * 10e-6), rel=0.3
        )
        assert result.busy["append"] == pytest.approx(
            result.tokens_s * (20e-6 / 100 + 10e-6), rel=0.05
        )
        assert result.jobs_s * 190 == pytest.approx(result.tokens_s, rel=0.2), "what begins ends"

    def test_a_full_server_is_what_limits(self) -> None:
        one, many = (
            simulate(workers, self.MIX, TOKENS, self.COSTS, seconds=2.0) for workers in (1, 48)
        )
        assert many.utilisation == pytest.approx(1.0, rel=0.02)
        assert many.speed < 0.7
        assert many.times_ms()["claim_p99_ms"] > 10 * one.times_ms()["claim_p99_ms"]
        assert many.times_ms()["heartbeat_p99_ms"] < 1e3 * LEASE_S, (
            "or the workers would lose their jobs"
        )

    @pytest.mark.parametrize("cutting", [TOKENS, INTERACTIVE])
    def test_steps_that_pile_up_share_chunks(self, cutting: Cutting) -> None:
        full = simulate(32, self.MIX, cutting, self.COSTS, seconds=4.0)
        assert full.tokens_s > 130_000, "10 µs a chunk, were each token one"
        assert full.tokens_s == pytest.approx(full.jobs_s * 190, rel=0.2), (
            "no token is lost in the sharing"
        )

    def test_gathered_chunks_make_room(self) -> None:
        each, gathered = (
            simulate(4, self.MIX, cutting, self.COSTS, seconds=4.0) for cutting in (TOKENS, EIGHTS)
        )
        assert gathered.speed > 0.97
        assert gathered.busy["append"] < each.busy["append"] / 2
        assert gathered.tokens_s == pytest.approx(gathered.jobs_s * 190, rel=0.2), (
            "no token is lost in the cutting"
        )

    def test_carried_is_where_speed_falls(self) -> None:
        results = [
            simulate(workers, self.MIX, TOKENS, self.COSTS, seconds=2.0) for workers in (1, 16)
        ]
        limit = carried(self.MIX, TOKENS, self.COSTS, results)
        assert simulate(limit, self.MIX, TOKENS, self.COSTS).speed >= KEPT
        assert simulate(limit + 2, self.MIX, TOKENS, self.COSTS).speed < KEPT


@pytest.mark.redis
def test_costs_are_measured_on_the_real_server() -> None:
    costs = calibrate(rounds=1)
    assert set(costs.chunk) == {cutting.tokens for cutting in CUTTINGS}
    for name, seconds in asdict(costs).items():
        for each in seconds.values() if isinstance(seconds, dict) else (seconds,):
            assert 0 <= each < 0.01, name
    assert min(costs.chunk.values()) > 0 < costs.submit
    assert costs.opened > costs.chunk[1], "the server has asked for the job once, and not again"


def test_the_command_writes_both_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert (
        main(
            ["simulate", "--part", "engine", "--load", "0.5", "--seconds", "3", "--json", str(out)]
        )
        == 0
    )
    rows = json.loads(out.read_text())["engine"]["rows"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    printed = capsys.readouterr().out
    assert "H200" in printed
    assert max(map(len, printed.splitlines())) <= 80
