"""The first steps, made before anyone waits for them: kernels are compiled, weights packed, graphs captured.

One prompt and its decode, greedy and drawn; where CUDA graphs run, a decode of every padded batch too. All
of it writes to blocks that nobody holds, and leaves no trace in the engine's books. Plain Python.
"""

from __future__ import annotations

from collections.abc import Callable

from schemas.generation import SamplingParams
from worker.engine.plan import ScheduledSequence, StepPlan
from worker.engine.runners import Runner
from worker.engine.sequence import Sequence
from worker.engine.synthetic import is_synthetic

PROMPT_TOKENS = 32


def warm_up(runner: Runner, report: Callable[[str, float], None]) -> None:
    """Raises whatever a step raises: then no step would succeed."""
    if is_synthetic(runner.config.model):
        return
    report("warming up", 0.0)
    length = max(1, min(PROMPT_TOKENS, runner.max_model_len - 2, runner.config.max_num_batched_tokens))
    length = min(length, runner.cache_config.block_size * (min(runner.cache_config.num_blocks) - 1) - 1)
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1)):
        sequence = _sequence(runner, length, params)
        runner.execute(StepPlan(0, (ScheduledSequence(sequence, 0, length, True),)))
        _decode(runner, [sequence])
    sizes = _graph_batches(runner)
    for index, size in enumerate(sizes):
        report(f"capturing decodes of {size}", index / len(sizes))
        _decode(runner, [_sequence(runner, length, SamplingParams(temperature=0.0)) for _ in range(size)])


def _sequence(runner: Runner, length: int, params: SamplingParams) -> Sequence:
    """All of them write to the same blocks: what comes out is nobody's answer."""
    cache = runner.cache_config
    table = list(range(1, 1 + -(-(length + 1) // cache.block_size)))
    tables = [list(table) for _ in cache.groups]
    return Sequence("warm-up", [0] * length, length, params, max_tokens=2, block_tables=tables)


def _decode(runner: Runner, sequences: list[Sequence]) -> None:
    items = tuple(ScheduledSequence(s, s.num_tokens - 1, 1, True) for s in sequences)
    runner.execute(StepPlan(0, items))
    runner.release(sequences)


def _graph_batches(runner: Runner) -> list[int]:
    """The largest decode of each shape, the commonest (small) ones captured last and so kept longest."""
    config = runner.config
    if not config.cuda_graphs:
        return []
    from worker.engine.graph_inputs import padded_batch  # needs torch, as whoever runs graphs does

    sizes = {size for n in range(1, config.max_num_seqs + 1) if (size := padded_batch(n)) <= config.max_num_seqs}
    return sorted(sizes)[: max(1, config.max_cached_graphs // 2)][::-1]
