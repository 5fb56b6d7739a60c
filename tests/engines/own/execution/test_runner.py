"""The runner by hand-made plans: launch ahead of finish, drafts, failures of one sequence, block
moves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.own.support import ChunkingPlanner, execute, make_sequence
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.execution.build import load_model_runner
from tokenmill_worker.engines.own.execution.runner import ModelRunner
from tokenmill_worker.engines.own.plan import BlockCopy, ScheduledSequence, StepPlan
from tokenmill_worker.engines.own.sequence import Sequence


def load(folder: Path, **changes: object) -> ModelRunner:
    settings: dict[str, object] = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "attention": "reference",
        "fuse": False,
        "block_size": 4, "num_blocks": 100, "max_num_seqs": 2,
    }  # fmt: skip
    return load_model_runner(EngineConfig(**{**settings, **changes}))  # type: ignore[arg-type]


def answer(runner: ModelRunner, *sequences: Sequence, chunk: int = 64) -> list[list[int]]:
    """Run the sequences together to their ends."""
    planner = ChunkingPlanner(runner.info.cache_config, chunk)
    for sequence in sequences:
        planner.add(sequence)
    while not (plan := planner.plan()).is_empty:
        planner.commit(plan, execute(runner, plan))
    runner.release(sequences)
    return [sequence.output_ids for sequence in sequences]


def whole_table(sequence: Sequence, num_blocks: int, first: int = 1) -> Sequence:
    sequence.block_tables = [list(range(first, first + num_blocks))]
    return sequence


def test_a_step_launched_before_the_last_step_is_read_gives_the_same_tokens(llama: Path) -> None:
    runner = load(llama)
    [wanted] = answer(runner, make_sequence("sync", [5, 6, 7], 3))
    sequence = whole_table(make_sequence("ahead", [5, 6, 7], 3), 4)
    first = runner.launch(StepPlan(0, (ScheduledSequence(sequence, 0, 3, True),)))
    sequence.num_computed_tokens, sequence.num_inflight = 3, 1
    second = runner.launch(StepPlan(1, (ScheduledSequence(sequence, 3, 1, True),)))
    assert runner.finish(first).token_ids == ((wanted[0],),)
    assert runner.finish(second).token_ids == ((wanted[1],),)


def test_a_token_in_flight_is_read_for_its_own_sequence_among_others(llama: Path) -> None:
    """The rows of two steps differ: the newcomer comes first in the second step."""
    runner = load(llama)
    wanted = answer(runner, make_sequence("a", [9], 2), make_sequence("b", [5, 6, 7], 2))
    a, b = (
        whole_table(make_sequence("a", [9], 2), 4),
        whole_table(make_sequence("b", [5, 6, 7], 2), 4, first=10),
    )
    first = runner.launch(StepPlan(0, (ScheduledSequence(b, 0, 3, True),)))
    second = runner.launch(
        StepPlan(1, (ScheduledSequence(a, 0, 1, True), ScheduledSequence(b, 3, 1, True)))
    )
    assert runner.finish(first).token_ids == ((wanted[1][0],),)
    assert runner.finish(second).token_ids == ((wanted[0][0],), (wanted[1][1],))


def test_a_token_neither_on_the_host_nor_in_flight_is_an_error(llama: Path) -> None:
    runner = load(llama)
    sequence = whole_table(make_sequence("lost", [5, 6, 7], 3), 4)
    with pytest.raises(RuntimeError, match="a token of lost is neither on the host nor in flight"):
        execute(runner, StepPlan(0, (ScheduledSequence(sequence, 3, 1, True),)))


@pytest.mark.parametrize("wrong_at", [0, 1, 2])
def test_drafts_are_accepted_up_to_the_first_wrong_one(llama: Path, wrong_at: int) -> None:
    runner = load(llama)
    [wanted] = answer(runner, make_sequence("plain", [5, 6, 7], 6))
    sequence = whole_table(make_sequence("drafted", [5, 6, 7], 6), 4)
    drafts = tuple(wanted[1:3])
    if wrong_at < 2:
        drafts = tuple(3 if i == wrong_at else token for i, token in enumerate(drafts))
    sequence.token_ids.append(wanted[0])
    sequence.num_computed_tokens = 0
    output = execute(runner, StepPlan(0, (ScheduledSequence(sequence, 0, 6, True, drafts),)))
    assert output.token_ids == (tuple(wanted[1 : wrong_at + 2]),)


def test_a_chunk_that_is_not_the_last_gives_no_token(llama: Path) -> None:
    runner = load(llama)
    a, b = (
        whole_table(make_sequence("a", [5, 6, 7, 8], 2), 4),
        whole_table(make_sequence("b", [9], 2), 4, first=10),
    )
    output = execute(
        runner, StepPlan(7, (ScheduledSequence(a, 0, 2, False), ScheduledSequence(b, 0, 1, True)))
    )
    assert output.step_id == 7
    assert len(output.token_ids) == 1
    assert execute(runner, StepPlan(8, (ScheduledSequence(a, 2, 1, False),))).token_ids == ()


@pytest.mark.parametrize(("backend", "fuse"), [("reference", False), ("cpu", True)])
def test_only_the_sequence_whose_logits_are_not_finite_fails(
    llama: Path, backend: str, fuse: bool
) -> None:
    """The blocks that hold its NaN may be given to any sequence afterwards."""
    runner = load(llama, attention=backend, fuse=fuse, block_size=16)
    embedding = runner._loaded.model.get_input_embeddings()  # type: ignore[operator]
    good = answer(runner, make_sequence("good", range(3, 25), 5))[0]
    with torch.no_grad():
        embedding.weight[300] = float("nan")
    poisoned = whole_table(make_sequence("poisoned", [5, 300, 7], 4), 4)
    other = whole_table(make_sequence("other", range(3, 25), 5), 2, first=10)
    plan = StepPlan(
        0, (ScheduledSequence(poisoned, 0, 3, True), ScheduledSequence(other, 0, 22, True))
    )
    output = execute(runner, plan)
    assert list(output.errors) == [0]
    assert "not finite" in output.errors[0]
    assert output.token_ids == ((), (good[0],))
    heir = make_sequence("heir", range(3, 25), 5)
    heir.block_tables = [[2, 1]]  # the first is half filled, the second was never written by it
    assert execute(runner, StepPlan(1, (ScheduledSequence(heir, 0, 22, True),))).token_ids == (
        (good[0],),
    )


def test_moved_blocks_keep_their_content(llama: Path) -> None:
    """Blocks go to the host and come back to other blocks; the answer continues as if nothing had
    happened.
    """
    runner = load(llama, cpu_offload_gib=0.001)
    prompt = list(range(3, 13))
    [wanted] = answer(runner, make_sequence("still", prompt, 2))
    moved = whole_table(make_sequence("moved", prompt, 2), 3)
    first = execute(runner, StepPlan(0, (ScheduledSequence(moved, 0, 10, True),)))
    moved.token_ids.extend(first.token_ids[0])
    out = tuple(BlockCopy(block, host) for block, host in ((1, 5), (2, 6), (3, 0)))
    execute(runner, StepPlan(1, (), swap_out=out))
    runner.release([moved])
    other = whole_table(make_sequence("other", [20] * 12, 2), 3)  # takes the blocks
    execute(runner, StepPlan(2, (ScheduledSequence(other, 0, 12, True),)))
    back = tuple(BlockCopy(host, block) for host, block in ((5, 31), (6, 30), (0, 41)))
    moved.block_tables = [[31, 30, 41]]
    moved.epoch += 1
    plan = StepPlan(3, (ScheduledSequence(moved, 10, 1, True),), swap_in=back)
    assert execute(runner, plan).token_ids == ((wanted[1],),)


def test_rows_are_reused_and_grow_with_the_batch(llama: Path) -> None:
    runner = load(llama)
    sequences = [make_sequence(str(i), [5 + i, 6, 7], 3) for i in range(9)]
    together = answer(runner, *sequences)
    assert not runner._inputs._rows
    assert together == [
        answer(runner, make_sequence("alone", [5 + i, 6, 7], 3))[0] for i in range(9)
    ]


def test_a_readmitted_sequence_is_read_from_its_new_blocks(llama: Path) -> None:
    """A preemption raises the epoch; its new blocks must not be mixed with the old ones."""
    runner = load(llama)
    [wanted] = answer(runner, make_sequence("still", range(3, 20), 2))
    sequence = whole_table(make_sequence("moved", range(3, 20), 2), 5)
    first = execute(runner, StepPlan(0, (ScheduledSequence(sequence, 0, 17, True),)))
    sequence.block_tables = [[50, 51, 52, 53, 54]]
    sequence.epoch += 1
    assert (
        execute(runner, StepPlan(1, (ScheduledSequence(sequence, 0, 17, True),))).token_ids
        == first.token_ids
    )
    sequence.token_ids.extend(first.token_ids[0])
    assert execute(runner, StepPlan(2, (ScheduledSequence(sequence, 17, 1, True),))).token_ids == (
        (wanted[1],),
    )


def test_automatic_settings_are_resolved(llama: Path) -> None:
    runner = load(llama, attention="auto", num_blocks=None, max_memory_gib=0.01)
    assert runner.info.config.attention in ("cpu", "reference")
    assert runner.info.config.kv_dtype == "float32"
    assert runner.info.config.max_model_len == 256
    assert not runner.info.is_asynchronous
    assert not runner.info.can_structure, "there is no tokenizer beside the model"
    assert "float32" in runner.info.description
    assert f"{runner.info.cache_config.num_usable} blocks of 4 tokens" in runner.info.description


def test_a_context_that_the_memory_cannot_hold_is_refused_or_shortened(llama: Path) -> None:
    per_token = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, bytes
    with pytest.raises(
        EngineConfigError,
        match=r"max_memory_gib \(.*\) holds sequences of \d+ tokens, not 256: raise it",
    ):
        load(llama, num_blocks=None, max_model_len=256, max_memory_gib=200 * per_token / 2**30)
    # too short to be worth running
    with pytest.raises(EngineConfigError, match="holds sequences of"):
        load(llama, num_blocks=None, max_memory_gib=200 * per_token / 2**30)
    with pytest.raises(
        EngineConfigError, match=r"max_memory_gib \(1e-06\) holds no sequence at all: raise it"
    ):
        load(llama, num_blocks=None, max_memory_gib=1e-6)
    with pytest.raises(EngineConfigError, match="holds no KV cache beside the activations"):
        load(llama, num_blocks=None, max_memory_percent=1e-9)


def test_a_setting_outside_its_choices_is_refused_with_the_choices() -> None:
    with pytest.raises(EngineConfigError) as refused:
        EngineConfig(model="any", kv_dtype="int8", quantization="int2", preempt="all")  # type: ignore[arg-type]
    assert len(refused.value.problems) == 3
    assert "kv_dtype must be one of auto, float32" in refused.value.problems[1]
