"""Each argument of Transformers' batching configuration has its meaning, or is refused by name."""

import dataclasses
import re

import pytest
import transformers
from transformers import GenerationConfig

from tests.engines.own.direct.conftest import GREEDY
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import (
    BatchedModel,
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    EngineConfig,
    EngineError,
)
from tokenmill_worker.engines.own.config.machine import total_memory

DEFAULTS = EngineConfig(model="any")
GIB = 1 << 30


def applied(hints=None, config=DEFAULTS, **arguments):
    return ContinuousBatchingConfig(**arguments).applied_to(config, hints)


def test_each_value_of_the_batching_config_reaches_the_engine():
    given = {
        "page_size": 32, "num_blocks": 9, "max_batch_tokens": 77, "max_requests_per_batch": 5,
        "max_memory_percent": 0.8, "scheduler_type": "prefill_first", "safety_margin": 0.15,
        "allow_block_sharing": False, "use_cuda_graph": True, "use_async_batching": True,
        "q_padding_interval_size": 8, "kv_padding_interval_size": 128, "max_cached_graphs": 5,
        "cpu_offload_space": 0.25,
    }  # fmt: skip
    expected = {
        "block_size": 32, "num_blocks": 9, "max_num_batched_tokens": 77, "max_num_seqs": 5,
        "max_memory_percent": 0.8, "policy": "prefill_first", "safety_margin": 0.15,
        "prefix_cache": False, "cuda_graphs": True, "async_batching": True,
        "q_padding_interval": 8, "kv_padding_interval": 128, "max_cached_graphs": 5,
        "cpu_offload_gib": 0.25,
    }  # fmt: skip
    assert applied(**given) == DEFAULTS.replace(**expected)


def test_without_arguments_the_engine_keeps_its_defaults():
    assert applied() == DEFAULTS
    assert applied(q_padding_interval_size=0, kv_padding_interval_size=0) == DEFAULTS


def test_defaults_equal_those_of_the_documents():
    engine = applied()
    assert (engine.policy.value, engine.prefix_cache, engine.cpu_offload_gib) == ("fifo", True, 0.0)
    assert (engine.max_memory_percent, engine.q_padding_interval) == (0.9, 64)
    assert (engine.num_blocks, engine.cuda_graphs, engine.async_batching) == (None, None, None)


def test_pages_have_two_names_and_one_value():
    assert applied(page_size=64) == applied(block_size=64) == applied(page_size=64, block_size=64)
    with pytest.raises(ValueError, match="page_size=64 and block_size=32 name one thing"):
        ContinuousBatchingConfig(page_size=64, block_size=32)


def test_num_blocks_counts_usable_blocks(llama):
    config = ContinuousBatchingConfig(num_blocks=9)
    with BatchedModel.from_pretrained(str(llama), block_size=16) as model:
        manager = model.init_continuous_batching(continuous_batching_config=config)
        assert manager._engine.capacity().free_blocks == 9


def test_use_cuda_graph_must_be_equal_for_both_paths():
    assert applied(use_cuda_graph=(True, True)).cuda_graphs is True
    assert applied(use_cuda_graph=(False, False)).cuda_graphs is False
    with pytest.raises(ValueError, match=r"use_cuda_graph=\(True, False\) is not possible"):
        ContinuousBatchingConfig(use_cuda_graph=(True, False))


def test_the_offload_space_follows_memory_by_default_and_is_cut_to_its_share():
    total = total_memory() / GIB
    assert applied(cpu_offload_space=None).cpu_offload_gib == "auto"
    quarter = {"cpu_offload_space_safety_threshold": 0.25}
    assert applied(cpu_offload_space=None, **quarter).cpu_offload_gib == total / 4
    assert applied(cpu_offload_space=total, **quarter).cpu_offload_gib == total / 4
    assert applied(cpu_offload_space=0.5).cpu_offload_gib == 0.5
    off = applied(cpu_offload_space=1, cpu_offload_space_safety_threshold=0)
    assert off.cpu_offload_gib == 0


@dataclasses.dataclass
class Hints:
    num_requests: int
    max_prompt_length: int = 100


def test_a_hint_of_few_requests_lowers_max_num_seqs_and_never_raises_it():
    assert applied(Hints(5)).max_num_seqs == 5
    assert applied(Hints(0)) == applied(Hints(1000)) == DEFAULTS
    limited = DEFAULTS.replace(max_num_seqs=8)
    assert applied(Hints(9), limited).max_num_seqs == 8
    assert applied(Hints(5), max_requests_per_batch=7).max_num_seqs == 7


@pytest.mark.parametrize(
    "argument",
    [
        {"max_blocks_per_request": 16},
        {"varlen_compile_config": {"mode": "default"}},
        {"decode_compile_config": {}},
        {"default_compile_level": 1},
        {"use_default_compile_configs": True},
        {"disable_nccl_graph_mixing": False},
        {"cpu_group_timeout": 3.0},
    ],
)
def test_an_argument_without_meaning_here_is_refused_by_name(argument):
    ((name, value),) = argument.items()
    sentence = re.escape(f"{name}={value!r} has no meaning here: ")
    with pytest.raises(ValueError, match=f"^{sentence}"):
        ContinuousBatchingConfig(**argument)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ({"page_size": 0}, "page_size must be at least 1, not 0"),
        ({"max_requests_per_batch": 0}, "max_requests_per_batch must be at least 1, not 0"),
        ({"max_queue_size": -1}, "max_queue_size must be at least 0, not -1"),
        ({"cpu_offload_space_safety_threshold": 2}, r"must be in \[0, 1\], not 2"),
    ],
)
def test_a_value_out_of_range_is_refused(argument, sentence):
    with pytest.raises(ValueError, match=sentence):
        ContinuousBatchingConfig(**argument)


def test_all_problems_of_a_configuration_are_reported_together():
    with pytest.raises(ValueError, match=r"default_compile_level=2 .*; cpu_group_timeout=None "):
        ContinuousBatchingConfig(default_compile_level=2, cpu_group_timeout=None)


def test_every_argument_of_transformers_is_accepted_with_its_default():
    theirs = dataclasses.fields(transformers.ContinuousBatchingConfig)
    ours = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    assert {field.name for field in theirs} - ours == set()
    found = ContinuousBatchingConfig.of(transformers.ContinuousBatchingConfig())
    assert found == ContinuousBatchingConfig()


def test_a_transformers_batching_configuration_is_accepted(llama):
    theirs = transformers.ContinuousBatchingConfig(num_blocks=20, return_logprobs=True)
    config = GenerationConfig(max_new_tokens=2, eos_token_id=-1)
    with BatchedModel.from_pretrained(str(llama)) as model:
        (output,) = model.generate_batch([[65]], config, theirs).values()
        assert len(output.logprobs) == 2
        assert model._built_for.num_blocks == 20
        theirs.default_compile_level = 3
        with pytest.raises(ValueError, match="default_compile_level=3 has no meaning here"):
            model.generate_batch([[65]], config, theirs)


def test_the_batching_config_of_a_generation_config_is_used_and_a_second_is_refused(llama):
    config = GenerationConfig(max_new_tokens=2, eos_token_id=-1)
    config.continuous_batching_config = ContinuousBatchingConfig(return_logprobs=True)
    with BatchedModel.from_pretrained(str(llama), num_blocks=64) as model:
        outputs = model.generate_batch([[65], [66]], config)
        assert all(len(output.logprobs) == 2 for output in outputs.values())
        with pytest.raises(ValueError, match="given twice"):
            model.generate_batch([[65]], config, ContinuousBatchingConfig())
        config.continuous_batching_config = {"num_blocks": 3}
        with pytest.raises(ValueError, match=r"not builtins\.dict"):
            model.generate_batch([[65]], config)


def test_a_seed_repeats_the_samples_and_differs_per_request(llama):
    config = GenerationConfig(max_new_tokens=12, do_sample=True, eos_token_id=-1)
    prompts = [[5, 6, 7]] * 4

    def tokens(seed):
        outputs = model.generate_batch(prompts, config, ContinuousBatchingConfig(seed=seed))
        return [tuple(one.generated_tokens) for one in outputs.values()]

    with BatchedModel.from_pretrained(str(llama), num_blocks=64) as model:
        first = tokens(1)
        assert tokens(1) == first
        assert tokens(2) != first
        assert len(set(first)) == 4
        assert len({*tokens(None), *tokens(None)}) == 8


def test_arguments_about_flash_and_processors_are_ignored():
    changed = applied(
        auto_switch_to_flash=False, per_request_processors=True, drop_unsupported_processors=False
    )
    assert changed == DEFAULTS


@pytest.fixture
def narrow(engine):
    with ContinuousBatchingManager(engine, GREEDY, max_queue_size=2) as manager:
        yield manager


def test_add_request_waits_while_the_queue_is_full(engine, narrow):
    taken, submit = [], engine.submit
    engine.submit = lambda requests: (taken.append(len(requests)), submit(requests))
    ids = narrow.add_requests([[65 + n] for n in range(9)])
    assert len(ids) == len({narrow.get_result(name).request_id for name in ids}) == 9
    assert max(taken) <= 2
    assert sum(taken) == 9
    del engine.submit


def test_a_full_queue_refuses_while_the_engine_does_not_step(engine, narrow):
    with narrow.pause():
        narrow.add_requests([[65], [66]])
        with pytest.raises(EngineError, match="2 requests wait: max_queue_size is reached"):
            narrow.add_request([67])
    assert len(list(narrow)) == 2
    idle = ContinuousBatchingManager(engine, GREEDY, max_queue_size=1)
    idle.add_request([65])
    with pytest.raises(EngineError, match="max_queue_size is reached"):
        idle.add_request([65])


def test_a_request_keeps_its_own_seed(engine):
    with ContinuousBatchingManager(engine, GREEDY, seed=3) as manager:
        params = SamplingParams(max_tokens=9, seed=11)
        found = [
            manager.get_result(manager.add_request([65], params=params)).generated_tokens
            for _ in range(2)
        ]
    assert found[0] == found[1]
