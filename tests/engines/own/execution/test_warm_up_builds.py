"""Every build of the attention kernels that a service can need is made by the steps before it is
ready.

A build depends on how a launch is cut up: the test plans launches for many mixed batches and
contexts.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.own.lora.support import engine_with
from tokenmill_worker.engines.own.attention import AttentionName
from tokenmill_worker.engines.own.attention.base import AttentionMetadata, AttentionShape
from tokenmill_worker.engines.own.attention.common_prefix import find_prefix, least_saved_tokens
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.config.cache import LayerGroup, Window
from tokenmill_worker.engines.own.cuda.graph_inputs import padded_shape
from tokenmill_worker.engines.own.cuda.graphs import graph_sizes
from tokenmill_worker.engines.own.device import StepInputs
from tokenmill_worker.engines.own.execution import warm_up as module_of_warm_up
from tokenmill_worker.engines.own.execution.warm_up import build_kernels, warm_up
from tokenmill_worker.engines.own.plan import StepPlan

pytest.importorskip("triton")
from tokenmill_worker.engines.own.cuda.attention.launch_plan import Launch, plan_launch

Lens = tuple[tuple[int, int], ...]  # (tokens of the step, context with them) of each sequence

LLAMA = AttentionShape(32, 8, 128, 0.1)
SMOLLM = AttentionShape(9, 3, 64, 0.1)
GEMMA = AttentionShape(4, 1, 256, 0.1)
MULTI_HEAD = AttentionShape(32, 32, 96, 0.1)
MAX_MODEL_LEN = 16_384
MAX_SEQS = 256


class Recorder:
    """Stands in for a runner: keeps what each step's sequences were."""

    def __init__(self, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "model": "none", "device": "cuda", "max_num_seqs": MAX_SEQS,
            "max_num_batched_tokens": 2048,
            "cuda_graphs": False,
        }  # fmt: skip
        config = EngineConfig(**{**settings, **changes})
        self.info = SimpleNamespace(
            config=config,
            warms_up=True,
            max_model_len=MAX_MODEL_LEN,
            cache_config=SimpleNamespace(block_sizes=[16], num_usable=1000),
            graphed_decodes=graph_sizes(config, MAX_MODEL_LEN).decodes,
        )
        self.steps: list[Lens] = []
        self.adapted: set[Lens] = set()

    def prepare_adapter(self, name: str) -> Future[str]:
        loaded: Future[str] = Future()
        loaded.set_result(f"{name}@1")
        return loaded

    def launch(self, plan: StepPlan) -> None:
        self.steps.append(
            tuple((item.num_tokens, item.start + item.num_tokens) for item in plan.scheduled)
        )
        if all(item.sequence.adapter == "first@1" for item in plan.scheduled):
            self.adapted.add(self.steps[-1])

    def finish(self, _step: None) -> None: ...

    def release(self, _sequences: object) -> None: ...


def warmed(**changes: Any) -> list[Lens]:
    recorder: Any = Recorder(**changes)
    warm_up(recorder, lambda _message, _fraction: None)
    steps: list[Lens] = recorder.steps
    return steps


def metadata_of(lens: Lens, window: Window | None) -> AttentionMetadata:
    empty = torch.zeros(len(lens), dtype=torch.int32)
    longest = max(context for _, context in lens)
    return AttentionMetadata(
        empty, empty, empty, empty, max(count for count, _ in lens), longest, 16, window
    )


def builds_of(
    steps: Iterable[Lens], shape: AttentionShape, window: Window | None, element_size: int
) -> set[Launch]:
    """Return the launches, reduced to what a build depends on."""
    builds = set()
    for lens in steps:
        launch = plan_launch(
            shape, metadata_of(lens, window), sum(count for count, _ in lens),
            element_size=element_size, num_multiprocessors=132, has_warp_groups=True,
            is_exact=element_size == 4,
        )  # fmt: skip
        builds.add(dataclasses.replace(launch, num_programs=0, least_tiles=0))
    return builds


def service() -> Iterable[Lens]:
    contexts = (1, 100, 300, 600, 1200, 2500, 5000, 9000, MAX_MODEL_LEN)
    for num_seqs, chunk, context in itertools.product(
        (1, 2, 4, 8, 16, 32, 64, 128, MAX_SEQS), (1, 2, 8, 20, 64, 200, 512, 1024, 2048), contexts
    ):
        yield ((chunk, max(chunk, context)), *((1, context),) * (num_seqs - 1))


@pytest.mark.parametrize("window", [None, Window(128), Window(1024)])
@pytest.mark.parametrize("element_size", [1, 2, 4])
@pytest.mark.parametrize(
    "shape", [LLAMA, SMOLLM, GEMMA, MULTI_HEAD], ids=["llama", "smollm", "gemma", "multi-head"]
)
def test_the_warm_up_makes_every_build_that_a_service_needs(
    shape: AttentionShape, element_size: int, window: Window | None
) -> None:
    needed = builds_of(service(), shape, window, element_size)
    assert needed <= builds_of(warmed(), shape, window, element_size)
    assert len(needed) <= 9


def prefix_builds_of(steps: Iterable[Lens], shape: AttentionShape) -> set[tuple[Launch, Launch]]:
    """Return the launches of decodes with a common prefix, the prefix's and the decode's, as graphs
    plan them.
    """
    group = LayerGroup((0,), shape.num_kv_heads, shape.head_dim)
    (least,) = least_saved_tokens([group], element_size=2)
    assert least is not None
    builds = set()
    for lens in steps:
        ends = np.array([context for _, context in lens])
        alike = np.ones((len(lens), MAX_MODEL_LEN // 16), np.int32)
        if max(lens)[0] == 1 and find_prefix(alike, ends, 16, least) is not None:
            (prefix,) = builds_of([((len(lens), MAX_MODEL_LEN),)], shape, None, 2)
            (decode,) = builds_of([((1, MAX_MODEL_LEN),) * len(lens)], shape, None, 2)
            builds.add((prefix, decode))
    return builds


@pytest.mark.parametrize("shape", [LLAMA, SMOLLM, GEMMA, MULTI_HEAD])
def test_the_warm_up_makes_every_build_for_common_prefixes(shape: AttentionShape) -> None:
    service = (
        ((1, context),) * num_seqs
        for num_seqs in (8, 16, 32, 64, 100, 128, 200, MAX_SEQS)
        for context in (600, 1200, 2048, 2500, 5000, 9000, MAX_MODEL_LEN)
    )
    builds = warmed(cuda_graphs=True, max_cached_graphs=1)  # whatever is captured at the start
    needed, made = prefix_builds_of(service, shape), prefix_builds_of(builds, shape)
    assert needed
    for which in (0, 1):
        assert {pair[which] for pair in needed} <= {pair[which] for pair in made}


@pytest.mark.parametrize(("max_num_seqs", "largest"), [(5, 8), (60, 64), (256, 256), (1000, 1024)])
def test_the_warm_up_captures_the_largest_and_small_batches(
    max_num_seqs: int, largest: int
) -> None:
    decodes = [
        lens for lens in warmed(cuda_graphs=True, max_num_seqs=max_num_seqs) if max(lens)[0] == 1
    ]
    assert max(map(len, decodes)) <= max_num_seqs
    config = EngineConfig(model="none")
    shapes = {padded_shape(step_of(lens), config, MAX_MODEL_LEN) for lens in decodes}
    sizes = {shape.num_seqs for shape in shapes}
    assert max(sizes) == largest
    assert {1, 2, 4, 8} <= sizes
    assert len(shapes) <= config.max_cached_graphs
    contexts = (30, 2048, 2049, 5000, 8193, MAX_MODEL_LEN - 1)
    if max_num_seqs <= 256:
        steps = (
            step_of(((1, context), *((1, 30),) * n))
            for n in range(max_num_seqs)
            for context in contexts
        )
        assert shapes == {padded_shape(step, config, MAX_MODEL_LEN) for step in steps}


def test_a_small_graph_cache_keeps_short_contexts_of_the_largest_and_of_small_batches() -> None:
    """The largest batch is among them; what is captured last is kept longest."""
    config = EngineConfig(model="none", cuda_graphs=True, max_num_seqs=60, max_cached_graphs=8)
    decodes = graph_sizes(config, MAX_MODEL_LEN).decodes
    assert [decode[:2] for decode in decodes] == [(n, 2048) for n in (60, 16, 8, 4, 2, 1)]


@pytest.mark.parametrize(("max_model_len", "count"), [(16_384, 52), (131_072, 91)])
@pytest.mark.parametrize(("attention", "prefixed"), [("flash", 0), ("triton", 10)])
def test_the_warm_up_captures_a_bounded_number_of_graphs(
    max_model_len: int, count: int, attention: AttentionName, prefixed: int
) -> None:
    """Decodes with a common prefix have one for each batch of at least 8."""
    config = EngineConfig(
        model="none", cuda_graphs=True, max_num_seqs=MAX_SEQS, attention=attention
    )
    decodes = graph_sizes(config, max_model_len).decodes
    assert sum(decode.has_prefix for decode in decodes) == prefixed
    assert len(decodes) == count + prefixed


def test_each_decode_is_captured_with_an_adapter_too() -> None:
    recorder: Any = Recorder(cuda_graphs=True, max_num_seqs=8, adapters="first=/a,second=/b")
    warm_up(recorder, lambda _message, _fraction: None)
    decodes = [lens for lens in recorder.steps if len(lens) == 8 and lens[0][1] > lens[1][1]]
    assert len(decodes) == 2 * len(set(decodes)) == 8
    assert recorder.adapted >= set(decodes)


def test_the_warm_up_stops_capturing_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log shows the kernels' seconds and how many graphs there were to capture."""
    recorder: Any = Recorder(cuda_graphs=True)
    reports: list[str] = []
    monkeypatch.setattr(module_of_warm_up, "CAPTURE_S", 0.0)
    warm_up(recorder, lambda message, _fraction: reports.append(re.sub(r"\d+\.\d s", "T", message)))
    assert reports == [
        "warming up",
        "compiling kernels",
        "kernels compiled in T",
        "capturing 52 CUDA graphs",
        "1 decodes run for CUDA graphs in T",
    ]
    assert len(recorder.steps[-1]) == MAX_SEQS


def step_of(lens: Lens) -> StepInputs:
    tokens = torch.zeros(len(lens), dtype=torch.int64)
    return StepInputs(tokens, tokens, tokens, (metadata_of(lens, None),))


@pytest.mark.parametrize(
    "changes", [{}, {"max_num_seqs": 1, "num_blocks": 8}, {"max_num_batched_tokens": 16}]
)
def test_a_runner_executes_the_steps_of_the_warm_up(
    folder_of: Callable[[str], Path], changes: dict[str, Any]
) -> None:
    runner: Any = engine_with(folder_of("llama"), {}, **changes).runner
    build_kernels(runner)
    assert not runner._inputs._rows
