"""The simulation: costs follow the roofline, and calls of a queue server are counted."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ops.benchmarks.__main__ import main
from ops.benchmarks.commands.simulate import (
    ANSWERS,
    MIXES,
    OVERHEAD_S,
    SHAPE,
    Mix,
    ScriptCosts,
    mean_answer,
    server_s,
    step_s,
    tokens_s,
)
from tokenmill_worker.publish.chunker import MOST_TOGETHER
from tokenmill_worker.queue.consumer import MAX_AT_ONCE


class TestCosts:
    def test_a_single_decode_reads_the_weights_once(self) -> None:
        weights = 2 * SHAPE.num_weights / (0.85 * 4.8e12)
        assert step_s(1, 1, 1, 1) == pytest.approx(OVERHEAD_S + weights, rel=1e-3)

    def test_long_prefills_are_bound_by_operations(self) -> None:
        body = SHAPE.num_weights - 4096 * 128_256
        head_s = 2 * 4096 * 128_256 / (0.85 * 4.8e12)
        assert step_s(8192, 1, 0, 0) == pytest.approx(
            OVERHEAD_S + 8192 * 2 * body / (0.65 * 989e12) + head_s
        )

    def test_keys_and_values_are_read_by_bandwidth(self) -> None:
        few, many = (step_s(64, 64, 64 * each, 64 * each) for each in (1000, 2000))
        assert many - few == pytest.approx(64 * 1000 * 131_072 / (0.85 * 4.8e12))


class TestQueueLoad:
    FREE = ScriptCosts(*[0.0] * len(fields(ScriptCosts)))
    MIX, TOKEN = MIXES["short prompts"], ANSWERS["a chunk per token"]

    def test_a_device_gives_a_token_to_each_place_in_a_step(self) -> None:
        lone = Mix(prompt_tokens=0, context=220, num_sequences=64)
        a_step_s = step_s(64, 64, 64 * 220, 64 * 220)
        assert tokens_s(lone) == pytest.approx(64 / a_step_s)
        assert tokens_s(replace(lone, prompt_tokens=64)) < tokens_s(lone), "prompts take time too"

    def test_tokens_share_chunks_on_a_full_server(self) -> None:
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


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["simulate", "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    *servers, days = results.values()
    assert [list(cases) for cases in servers] == [list(ANSWERS)] * len(MIXES)
    assert min(day["goodput"] for day in days.values()) >= 0.97
    assert [name for name, day in days.items() if day["hours"] > 1.15] == ["people alone"]
    printed = capsys.readouterr().out
    assert "workers" in printed
    assert max(map(len, printed.splitlines())) <= 80
