"""Runs steps before the first request: compiles kernels, packs weights, captures graphs.

The steps are one prompt and its decode, greedy and sampled. On a GPU, further steps need other
builds of the kernels, and with CUDA graphs there is a decode of every padded batch and length. They
write to blocks that no sequence holds, and leave scheduler and cache bookkeeping unchanged. Plain
Python.
"""

from __future__ import annotations

import time

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.execution.interface import Runner
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepPlan
from tokenmill_worker.engines.own.sequence import Sequence
from tokenmill_worker.engines.own.types import ProgressCallback

PROMPT_TOKENS = 32
CHUNK_TOKENS = (128, 300)  # the second counts as large also for kernels that look at tokens alone
LONG_CONTEXT = 4096  # attention splits it into several parts
PREFIX_SEQS = (32, 64)  # decodes with a common prefix: with more its kernel takes more rows
PREFIX_TOKENS = 2**18  # of such a decode: enough that reading the prefix once pays
GREEDY = SamplingParams(temperature=0.0)
CAPTURE_S = 60.0  # decodes not captured by then are captured when a step first needs them


def warm_up(runner: Runner, report: ProgressCallback) -> None:
    """Run the warm-up steps.

    An error of a step is raised, since then no step would succeed.
    """
    if not runner.info.warms_up:
        return
    report("warming up", 0.0)
    started = time.monotonic()
    length = max(
        1,
        min(
            PROMPT_TOKENS, runner.info.max_model_len - 2, runner.info.config.max_num_batched_tokens
        ),
    )
    for params in (GREEDY, SamplingParams(seed=1)):
        sequence = _sequence(runner, length, params)
        _run(runner, (ScheduledSequence(sequence, 0, length, True),))
        _execute(runner, [(sequence, 1)])
    if runner.info.config.device == "cpu":
        return
    report("compiling kernels", 0.0)
    build_kernels(runner)
    report(f"kernels compiled in {time.monotonic() - started:.1f} s", 1.0)
    if runner.info.graphed_decodes:
        capture_decodes(runner, report)


def capture_decodes(runner: Runner, report: ProgressCallback) -> None:
    """Run a decode of each padded batch and length, which captures its graph, up to CAPTURE_S.

    With adapters, each of them runs a second time with one: it has a graph of its own.
    """
    names = list(runner.info.config.adapter_folders)[:1]
    adapters = ["", *(runner.prepare_adapter(name).result() for name in names)]
    cases = [(key, *decode) for key in adapters for decode in runner.info.graphed_decodes]
    report(f"capturing {len(cases)} CUDA graphs", 0.0)
    count, started = 0, time.monotonic()
    for adapter, size, context, has_prefix in cases:
        if has_prefix:
            sequences = [_alike(runner, size, GREEDY, adapter) for _ in range(size)]
        else:
            longest = min(context, runner.info.max_model_len - 1)
            contexts = [longest, *[min(PROMPT_TOKENS, longest)] * (size - 1)]
            sequences = [_sequence(runner, tokens, GREEDY, adapter) for tokens in contexts]
        _execute(runner, [(sequence, 1) for sequence in sequences])
        count += 1
        if time.monotonic() - started > CAPTURE_S:
            break
    report(f"{count} decodes run for CUDA graphs in {time.monotonic() - started:.1f} s", 1.0)


def build_kernels(runner: Runner) -> None:
    """Run steps that compile each kernel for few and for many tokens, and for long contexts.

    The next ones are as large as steps may be: a prompt alone, one beside a decode, decodes alone.
    The last ones have a common prefix. The presence penalty edits logits, which changes their type
    and needs a build of its own.
    """
    params = SamplingParams(seed=1, presence_penalty=1.0)
    config, longest = runner.info.config, max(1, min(LONG_CONTEXT, runner.info.max_model_len - 1))
    small, large = CHUNK_TOKENS
    for chunk, context in (
        (small, small),
        (PROMPT_TOKENS, longest),
        (large, longest),
        (1, longest),
    ):
        context = min(context, longest)
        chunk = min(chunk, context, max(1, config.max_num_batched_tokens - 1))
        tokens = (chunk, 1)[: config.max_num_seqs]
        _execute(runner, [(_sequence(runner, context, params), count) for count in tokens])
    full = max(1, min(config.max_num_batched_tokens, runner.info.max_model_len - 1))
    _execute(runner, [(_sequence(runner, full, params), full)])
    if config.max_num_seqs > 1 < full:
        prompt, decode = (_sequence(runner, max(full, longest), params) for _ in range(2))
        _execute(runner, [(prompt, full - 1), (decode, 1)])
    decodes = min(config.max_num_seqs, config.max_num_batched_tokens)
    _execute(runner, [(_sequence(runner, PROMPT_TOKENS, params), 1) for _ in range(decodes)])
    for count in {size for size in (*PREFIX_SEQS, decodes) if PREFIX_SEQS[0] <= size <= decodes}:
        if config.cuda_graphs:  # else no prefix is read once
            _execute(runner, [(_alike(runner, count, params), 1) for _ in range(count)])


def _alike(runner: Runner, num_seqs: int, params: SamplingParams, adapter: str = "") -> Sequence:
    """Return one of `num_seqs` dummy sequences, so long that their common prefix is read once."""
    length = max(LONG_CONTEXT, PREFIX_TOKENS // num_seqs)
    return _sequence(runner, max(1, min(length, runner.info.max_model_len - 1)), params, adapter)


def _sequence(runner: Runner, length: int, params: SamplingParams, adapter: str = "") -> Sequence:
    """Return a dummy sequence of `length` tokens.

    All sequences share the same blocks, long ones use them several times: the output is discarded.
    """
    cache = runner.info.cache_config
    tables = [
        [1 + index % cache.num_usable for index in range(-(-(length + 1) // size))]
        for size in cache.block_sizes
    ]
    return Sequence(
        "warm-up", [0] * length, length, params, max_tokens=2, adapter=adapter, block_tables=tables
    )


def _execute(runner: Runner, sequences: list[tuple[Sequence, int]]) -> None:
    """Run a step with the last `count` tokens of each sequence."""
    items = tuple(ScheduledSequence(s, s.num_tokens - count, count, True) for s, count in sequences)
    _run(runner, items)
    runner.release([sequence for sequence, _ in sequences])


def _run(runner: Runner, items: tuple[ScheduledSequence, ...]) -> None:
    runner.finish(runner.launch(StepPlan(0, items)))
