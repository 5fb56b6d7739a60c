"""The simulations: costs follow the roofline, the real scheduler serves a trace in virtual time,
queues saturate.
"""

import json
import math
import random
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ops.benchmarks.__main__ import main
from ops.benchmarks.simulation import eviction, memory
from ops.benchmarks.simulation.calibration import STORED, calibrate
from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.engine import POLICIES, Outcome, SimulatedEngine, figures
from ops.benchmarks.simulation.load import Arrival, arrivals
from ops.benchmarks.simulation.queue_layer import KEPT, carried, simulate
from ops.benchmarks.simulation.queue_server import HOP_S, Clock, QueueServer
from ops.benchmarks.simulation.queue_worker import (
    ANSWERS,
    Mix,
    Observations,
    Worker,
    split,
)
from tests.publish.support import FakeLog, admit, event
from tokenmill_worker.consume.consumer import MAX_AT_ONCE
from tokenmill_worker.publish.fair_batches import EVENTS_AT_ONCE, split_batches
from tokenmill_worker.publish.publisher import Publisher

COSTS = CostModel()


class TestCosts:
    def test_a_single_decode_reads_the_weights_once(self) -> None:
        weights = 2 * COSTS.shape.num_weights / (0.85 * 4.8e12)
        assert COSTS.seconds(1, 1, 1, 1) == pytest.approx(COSTS.overhead_s + weights, rel=1e-3)

    def test_long_prefills_are_bound_by_operations(self) -> None:
        body = COSTS.shape.num_weights - 4096 * 128_256
        head_s = 2 * 4096 * 128_256 / (0.85 * 4.8e12)
        assert COSTS.seconds(8192, 1, 0, 0) == pytest.approx(
            COSTS.overhead_s + 8192 * 2 * body / (0.65 * 989e12) + head_s
        )

    def test_keys_and_values_are_read_by_bandwidth(self) -> None:
        few, many = (COSTS.seconds(64, 64, 64 * each, 64 * each) for each in (1000, 2000))
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
        engine = SimulatedEngine(COSTS, dict(self.SETTINGS))
        (outcome,) = engine.run([Arrival(1.0, 1000, 10, 0, "t")], until=60.0)
        assert engine.steps == 2 + 9  # two chunks of at most 512, the second gives the first token
        assert outcome.is_complete
        assert outcome.ttft_s == pytest.approx(
            COSTS.seconds(512, 0, 512, 512 * 512) + COSTS.seconds(488, 1, 1000, 488 * 1000)
        )

    def test_everyone_is_served_and_time_goes_on(self) -> None:
        engine = SimulatedEngine(COSTS, dict(self.SETTINGS))
        outcomes = engine.run(
            [Arrival(0.1 * n, 200, 20, n % 3, "t") for n in range(40)], until=math.inf
        )
        assert all(outcome.is_complete for outcome in outcomes)
        assert engine.now > 3.9, "the last one came then"

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

    def is_good(self, *arguments: Any, **named: Any) -> bool:
        return self.outcome(*arguments, **named).is_good

    def test_goodness_depends_on_the_class(self) -> None:
        assert self.is_good(0, 0.9)
        assert not self.is_good(0, 1.1)
        assert self.is_good(1, 1.1)
        assert not self.is_good(0, 0.5, gap_s=0.3)
        assert not self.is_good(0, 0.5, tokens=2), "unfinished"
        assert self.is_good(2, 500.0, gap_s=100.0)

    def test_a_request_without_a_token_counts(self) -> None:
        found = figures([self.outcome(0, 0.5), self.outcome(0, None, tokens=0)], seconds=2.0)
        assert found["goodput"] == 0.5
        assert found["ttft_p99_s"] == math.inf


class TestQueueServer:
    def test_calls_are_served_in_order_of_arrival_by_one_thread(self) -> None:
        clock = Clock()
        ends: list[float] = []
        server = QueueServer(clock)
        for seconds in (0.5, 0.25):
            server.call("x", seconds, ends.append)
        clock.run(until=10.0)
        assert ends == pytest.approx([HOP_S + 0.5, HOP_S + 0.75])
        assert server.busy == {"x": 0.75}


class TestChunks:
    """The simulation cuts a backlog of tokens into parts and chunks as the product does."""

    @pytest.mark.parametrize(("jobs", "steps"), [(256, 3), (100, 3), (100, 300), (300, 1), (7, 1)])
    def test_parts_are_those_of_the_service(self, jobs: int, steps: int) -> None:
        events = [event("a", job_id=str(number)) for _ in range(steps) for number in range(jobs)]
        waiting = np.full(jobs, steps)
        assert [steps * len(part) for part in split(waiting, 256)] == [
            len(part) for part in split_batches(events, (), 256)
        ]

    @pytest.mark.parametrize("kind", ["token chunks", "interactive"])
    @pytest.mark.parametrize(
        ("sequences", "steps"), [(256, 4), (250, 2), (100, 3), (16, 20), (1, 40)]
    )
    async def test_chunks_are_as_many_as_the_publishers(
        self, kind: str, sequences: int, steps: int
    ) -> None:
        log, answers = FakeLog(), ANSWERS[kind]
        publisher = Publisher(log)
        names = [str(number) for number in range(sequences)]
        for name in names:
            publisher.open(await admit(name))
        await publisher.handle([event("a", job_id=name) for name in names])
        log.calls.clear()
        events = [event("b", job_id=name) for name in names * steps]
        at_once = max(EVENTS_AT_ONCE, sequences)
        urgent = {each.request_id for each in events} if answers.is_urgent else ()
        for batch in split_batches(events, urgent, at_once):
            await publisher.handle(batch)
        most = len(events) if answers.is_urgent else at_once
        made = [
            answers.cut(
                np.full(len(part), steps), np.ones_like(part, bool), np.zeros_like(part, bool)
            )
            for part in split(np.full(sequences, steps), most)
        ]
        assert [int(chunks.sum()) for _, chunks in made] == [len(call) for call in log.calls]
        assert sum(int(tokens.sum()) for tokens, _ in made) == sequences * steps

    def test_chunks_fill_and_an_end_leaves_with_what_is_there(self) -> None:
        held, opened = np.array([1, 7, 8, 3, 40]), np.array([False, True, True, True, True])
        ended = np.array([False, False, False, True, False])
        tokens, chunks = ANSWERS["chunks of 8"].cut(held, opened, ended)
        assert (tokens.tolist(), chunks.tolist()) == ([1, 0, 8, 3, 40], [1, 0, 1, 1, 3])
        tokens, chunks = ANSWERS["checkpoints"].cut(held, opened, ended)
        assert (tokens.tolist(), chunks.tolist()) == ([0, 0, 0, 0, 32], [0, 0, 0, 0, 1])


class TestQueueLayer:
    MIX = Mix(64, 220, num_sequences=100)
    COSTS = replace(STORED, append=20e-6, chunk=10e-6, token=3e-6, checkpoint=31e-6)

    def simulate(self, workers: int, kind: str, seconds: float = 4.0) -> dict[str, float]:
        return simulate(workers, self.MIX, ANSWERS[kind], self.COSTS, seconds=seconds)

    def test_beside_an_idle_server_the_devices_do_what_they_can(self) -> None:
        found = self.simulate(1, "token chunks", seconds=24.0)
        assert found["kept"] == pytest.approx(1.0, rel=0.05)
        assert found["added_p50_ms"] == pytest.approx(1e3 * (HOP_S + 20e-6 + 100 * 10e-6), rel=0.3)
        assert found["busy_append"] == pytest.approx(
            found["tokens_s"] * (20e-6 / 100 + 10e-6), rel=0.05
        )
        assert found["jobs_s"] * 190 == pytest.approx(found["tokens_s"], rel=0.2), (
            "what begins ends"
        )

    def test_claims_ask_for_the_free_slots_and_no_more_than_the_product_does(self) -> None:
        clock = Clock()
        server, seen = QueueServer(clock), Observations(0.0)
        worker = Worker(
            server, self.COSTS, self.MIX, ANSWERS["token chunks"], seen, random.Random(0)
        )
        worker._claim()
        clock.run(until=0.02)  # before the first answer ends
        assert server.busy["claim"] == pytest.approx(
            -(-104 // MAX_AT_ONCE) * self.COSTS.claim + 104 * self.COSTS.claimed
        )

    def test_a_full_server_is_what_limits(self) -> None:
        one, many = (self.simulate(workers, "token chunks", 2.0) for workers in (1, 48))
        assert one["kept"] > 0.95
        assert many["server"] == pytest.approx(1.0, rel=0.02)
        assert many["kept"] < 0.7
        assert many["added_p50_ms"] > 10 * one["added_p50_ms"]

    @pytest.mark.parametrize("kind", ["token chunks", "interactive"])
    def test_steps_that_pile_up_share_chunks(self, kind: str) -> None:
        full = self.simulate(32, kind)
        assert full["tokens_s"] > 130_000, "10 µs a chunk, were each token one"
        assert full["tokens_s"] == pytest.approx(full["jobs_s"] * 190, rel=0.2), "none is lost"

    def test_gathered_chunks_make_room(self) -> None:
        each, gathered = (self.simulate(4, kind) for kind in ("token chunks", "chunks of 8"))
        assert gathered["kept"] > 0.97
        assert gathered["busy_append"] < each["busy_append"] / 2
        assert gathered["tokens_s"] == pytest.approx(gathered["jobs_s"] * 190, rel=0.2)

    def test_carried_is_where_speed_falls(self) -> None:
        kind = ANSWERS["token chunks"]
        kept = {workers: self.simulate(workers, "token chunks", 2.0)["kept"] for workers in (1, 16)}
        limit = carried(self.MIX, kind, self.COSTS, kept)
        assert 1 <= limit < 16
        assert simulate(limit, self.MIX, kind, self.COSTS)["kept"] >= KEPT
        assert simulate(limit + 2, self.MIX, kind, self.COSTS)["kept"] < KEPT


def test_a_short_cache_preempts_and_every_answer_is_complete() -> None:
    trace = memory.traces(0)["64 long prompts beside 64 short"][:24]
    costs = memory.with_cache(memory.CACHE_TOKENS)
    assert costs.num_cache_tokens == pytest.approx(memory.CACHE_TOKENS, abs=1)
    assert costs.seconds(1, 1, 1, 1) == COSTS.seconds(1, 1, 1, 1)
    preempted = []
    for margin in (0.0, 0.2):
        limits: dict[str, object] = {"max_num_seqs": 64, "safety_margin": margin}
        engine = SimulatedEngine(costs, {"max_num_batched_tokens": 2_048, **limits})
        assert all(outcome.is_complete for outcome in engine.run(trace, until=math.inf))
        preempted.append(engine.counters.preemptions)
    assert preempted[0] > preempted[1] == 0


@pytest.mark.parametrize(
    ("order", "left"),
    [("least recently used", {2, 3, 4}), ("freed last", {1, 2, 4}), ("all at once", set())],
)
def test_an_order_evicts_its_block(order: str, left: set[int]) -> None:
    """Block 1 is freed in one step, 3 and 2 in the next, tail first; block 4 stays in use."""
    pool = eviction.ORDERS[order](5)
    for block in (1, 2, 3, 4):
        pool.commit_hash(pool.allocate(), b"%d" % block)
    for block in (1, 0, 3, 2):  # 0: the end of a step
        if block:
            pool.release(block)
        elif isinstance(pool, eviction.FreedLast):
            pool.end_step()
    taken = pool.allocate()
    assert pool.hashes[taken] is None
    assert {block for block in (1, 2, 3, 4) if pool.hashes[block]} == (left or {4})


def test_chats_find_most_where_the_least_recently_used_is_evicted() -> None:
    found = {
        name: eviction.Chats(order, 4_000, 12, seed=0).run()["found"]
        for name, order in eviction.ORDERS.items()
    }
    assert max(found, key=lambda name: found[name]) == "least recently used"


@pytest.mark.redis
def test_costs_are_measured_on_the_real_server() -> None:
    costs = calibrate(rounds=1)
    for name, seconds in asdict(costs).items():
        assert 0 <= seconds < 0.01, name
    assert min(costs.chunk, costs.checkpoint, costs.submit) > 0
    assert costs.opened > costs.chunk, "the server has asked for the job once, and not again"


def test_the_command_writes_both_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    wanted = ["--part", "engine", "--load", "0.5", "--seconds", "3", "--json", str(out)]
    assert main(["simulate", *wanted]) == 0
    assert list(json.loads(out.read_text())["results"]["load 0.5"]) == list(POLICIES)
    printed = capsys.readouterr().out
    assert "H200" in printed
    assert max(map(len, printed.splitlines())) <= 80
