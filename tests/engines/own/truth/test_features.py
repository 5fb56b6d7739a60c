"""The engine's features on real forward passes: none of them changes a token, and each is seen at
work.
"""

import dataclasses
import json

import msgspec
import pytest

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.truth import tiny_models
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams
from tokenmill_worker.contract.requests import Prompt
from tokenmill_worker.engines.own import EngineConfig, GenerationRequest

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request, folder_of):
    """One model of full attention, one with sliding windows beside it."""
    return folder_of(request.param)


def engine_of(folder, **changes):
    settings = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "num_blocks": 256,
        "block_size": 8,
        "max_num_batched_tokens": 48, "max_num_seqs": 8, "num_threads": 1,
    }  # fmt: skip
    return CollectingEngine.load(EngineConfig(**(settings | changes)))


def prompt(seed, length):
    return [3 + (seed * 31 + i * 7 + i * i) % (tiny_models.VOCAB - 3) for i in range(length)]


MIXED = [prompt(i, length) for i, length in enumerate((5, 40, 17, 33, 60, 9, 25, 48, 12, 55))]
PARAMS = [GREEDY if i % 2 else SEEDED for i in range(len(MIXED))]


@pytest.fixture(scope="module")
def undisturbed(folder):
    """Run each request alone in a large engine without a prefix cache."""
    engine = engine_of(folder, prefix_cache=False)
    pairs = zip(MIXED, PARAMS, strict=True)
    return [engine.generate_batch([ids], [params])[0].token_ids for ids, params in pairs]


def tokens(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
@pytest.mark.parametrize("offload", [0.0, 0.01])
def test_preemption_in_a_tiny_pool_changes_no_token(folder, undisturbed, policy, offload):
    engine = engine_of(
        folder, num_blocks=16, cpu_offload_gib=offload, policy=policy, safety_margin=0.0
    )
    assert tokens(engine.generate_batch(MIXED, PARAMS)) == undisturbed
    stats = engine.stats()
    assert stats.preemptions > 0
    if offload:
        assert stats.blocks_swapped_out > 0
        assert stats.blocks_swapped_in > 0
    else:
        assert stats.recomputed_tokens > 0
    check_integrity(engine.scheduler)
    assert stats.blocks_free == stats.blocks_total


@pytest.mark.parametrize("chunk", [5, 16, 512])
def test_prefix_hits_change_no_token(folder, undisturbed, chunk):
    engine = engine_of(folder, max_num_batched_tokens=chunk)
    first = engine.generate_batch(MIXED, PARAMS)
    again = engine.generate_batch(MIXED, PARAMS)
    assert tokens(first) == tokens(again) == undisturbed
    assert sum(output.num_cached_tokens for output in again) > 100


def test_a_shared_prefix_is_computed_once(folder):
    shared = prompt(1, 96)
    prompts = [shared + prompt(100 + i, 5) for i in range(16)]
    engine = engine_of(folder, max_num_seqs=16, max_num_batched_tokens=64)
    outputs = engine.generate_batch(
        prompts, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    )
    assert engine.stats().computed_tokens <= 96 + 16 * 5 + 16 * 8 + 16
    assert sorted(output.num_cached_tokens for output in outputs)[1:] == [96] * 15
    lone = engine_of(folder, prefix_cache=False)
    for ids, output in zip(prompts, outputs, strict=True):
        wanted = lone.generate_batch(
            [ids], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        )
        assert output.token_ids == wanted[0].token_ids


def test_the_next_turn_of_a_chat_hits_the_generated_tokens(folder):
    engine = engine_of(folder)
    first = engine.generate_batch([prompt(3, 30)], GREEDY)[0]
    turn = [*prompt(3, 30), *first.token_ids, *prompt(4, 6)]
    second = engine.generate_batch([turn], GREEDY)[0]
    assert second.num_cached_tokens >= 48  # the whole blocks of 30 prompt and 24 generated tokens
    assert (
        second.token_ids
        == engine_of(folder, prefix_cache=False).generate_batch([turn], GREEDY)[0].token_ids
    )


def test_tenants_do_not_share_their_prefixes(folder):
    engine = engine_of(folder)
    cached = {}
    for name, salt in (("a", "a"), ("b", "b"), ("c", "a")):
        engine.add_request(prompt(5, 40), GREEDY, name, cache_salt=salt)
        cached[name] = engine.result(name).num_cached_tokens
    assert cached["b"] == 0
    largest = max(engine.scheduler.kv.block_sizes)
    assert cached["c"] == 39 // largest * largest


def test_drafts_are_exact_and_accepted(folder):
    repeating = [prompt(6, 30), prompt(7, 4) * 8, prompt(8, 50)]
    loops = SamplingParams(
        max_tokens=40, temperature=0, ignore_eos=True, logit_bias={7: 90.0, 9: 89.0}
    )
    params = [loops, SEEDED, GREEDY]
    plain = tokens(engine_of(folder).generate_batch(repeating, params))
    engine = engine_of(folder, speculative_tokens=4)
    assert tokens(engine.generate_batch(repeating, params)) == plain
    assert engine.stats().accepted_tokens > 10  # the first one repeats itself
    assert engine.stats().steps < 40
    check_integrity(engine.scheduler)


def test_several_choices_share_the_prompts_blocks(folder):
    params = SamplingParams(max_tokens=12, n=4, seed=9, ignore_eos=True)
    engine = engine_of(folder)
    output = engine.generate_batch([prompt(9, 64)], params)[0]
    largest = max(engine.scheduler.kv.block_sizes)
    assert engine.stats().computed_tokens <= 64 + 4 * 12 + 3 * largest
    lone = engine_of(folder, prefix_cache=False).generate_batch([prompt(9, 64)], params)[0]
    assert tokens(output.choices) == tokens(lone.choices)


@pytest.mark.parametrize("cut", [1, 9, 23])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_a_resumed_answer_equals_the_undisturbed_one(folder, cut, params):
    whole = engine_of(folder).generate_batch([prompt(10, 21)], params)[0].token_ids
    engine = engine_of(folder)
    engine.submit(
        [
            GenerationRequest(
                request_id="r",
                prompt=Prompt(tuple(prompt(10, 21))),
                params=params,
                resumed=(whole[:cut],),
            )
        ]
    )
    received = []
    while engine.has_work:
        received += [token for event in engine.step() for token in event.token_ids]
    assert tuple(received) == whole[cut:]


def test_a_step_that_fails_once_changes_no_token(folder, undisturbed):
    engine = engine_of(folder)
    launch, calls = engine.runner.launch, []

    def flaky(plan):
        calls.append(plan.step_id)
        if len(calls) == 4:
            raise RuntimeError("a passing fault")
        return launch(plan)

    engine.runner.launch = flaky
    assert tokens(engine.generate_batch(MIXED, PARAMS)) == undisturbed
    assert engine.stats().failed_steps == 1


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)
def test_structured_output_matches_its_schema():
    """And a plain request beside it stays as it is alone."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    engine = CollectingEngine.load(
        EngineConfig(model="smollm2-135m-instruct", dtype="float32", num_blocks=128, num_threads=1)
    )
    shape = SamplingParams(
        max_tokens=60, temperature=0.7, seed=1, response_format=ResponseFormat(json_schema=schema)
    )
    number = SamplingParams(
        max_tokens=8, temperature=0, response_format=ResponseFormat(regex="[0-9]{3}-[0-9]{2}")
    )
    assert engine.runner.info.can_structure
    outputs = engine.generate_batch([[1, 2, 3, 4], [5, 6, 7], [8, 9]], [shape, number, GREEDY])
    assert outputs[2].token_ids == engine.generate_batch([[8, 9]], GREEDY)[0].token_ids
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine.runner.info.model_path)
    person = json.loads(tokenizer.decode(outputs[0].token_ids, skip_special_tokens=True))
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)
    text = tokenizer.decode(outputs[1].token_ids, skip_special_tokens=True)
    assert len(text) == 6
    assert text[3] == "-"
    assert outputs[1].finish_reason is FinishReason.STOP
    accepted = engine.stats().accepted_tokens
    assert accepted > 5, "the names of the schema are forced"
    undrafted = msgspec.structs.replace(shape, speculate=False)
    assert engine.generate_batch([[1, 2, 3, 4]], undrafted)[0].token_ids == outputs[0].token_ids
    assert engine.stats().accepted_tokens == accepted
    engine.runner.info = dataclasses.replace(engine.runner.info, is_asynchronous=True)
    ahead = CollectingEngine.around(engine.runner)
    prompts, params = [[1, 2, 3, 4], [5, 6, 7]], [shape, number]
    assert tokens(ahead.generate_batch(prompts, params)) == tokens(outputs[:2])
    assert ahead.stats().accepted_tokens > 3
