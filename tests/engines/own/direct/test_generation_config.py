"""Biased, banned and forced tokens of a Transformers GenerationConfig, and of single requests, give
the answers of `generate`.
"""

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tokenmill_worker.engines.own import BatchedModel, RequestStatus
from tokenmill_worker.engines.own.direct.batched_model import sampling_params

PROMPTS = [[5, 6, 7, 5, 6], [9], [8, 9, 8, 9, 8, 9, 8]]
BASE = {"max_new_tokens": 20, "eos_token_id": -1, "pad_token_id": 0}


@pytest.fixture(scope="module")
def plain(llama):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype="float32")
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module")
def batched(llama):
    with BatchedModel.from_pretrained(str(llama), num_blocks=64, dtype="float32") as model:
        yield model


def generated(model, **fields):
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        config = GenerationConfig(**{**BASE, "eos_token_id": None, **fields})
        full = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        answers.append(full[0, len(prompt) :].tolist())
    return answers


def rules_of(answers):
    """Return each field with values that change these answers."""
    first, second = answers[0][:2]
    pairs = [list(pair) for answer in answers for pair in itertools.pairwise(answer)]
    fields = {
        "bad_words_ids": [*pairs[:9], [second]],
        "sequence_bias": [[[first], -30.0], [[second, 44], 25.0], [[45], 4.0]],
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [second, answers[1][3]],
        "begin_suppress_tokens": [answer[0] for answer in answers],
        "forced_eos_token_id": 11,
        "repetition_penalty": 1.3,
    }
    return {**{name: {name: value} for name, value in fields.items()}, "all": fields}


@pytest.mark.timeout(240)
def test_each_rule_of_a_generation_config_gives_generate_s_tokens(plain, batched):
    before = generated(plain)
    for name, fields in rules_of(before).items():
        expected = generated(plain, **fields)
        assert expected != before, name
        outputs = batched.generate_batch(PROMPTS, GenerationConfig(**BASE, **fields))
        assert [one.generated_tokens for one in outputs.values()] == expected, name


def test_a_forced_first_token_is_generate_s_after_a_prompt_of_one_token(plain, batched):
    """And after any other prompt too, where `generate` forces none."""
    fields = {"forced_bos_token_id": 7, "begin_suppress_tokens": [8]}
    expected = generated(plain, **fields)
    outputs = batched.generate_batch(PROMPTS, GenerationConfig(**BASE, **fields))
    answers = [one.generated_tokens for one in outputs.values()]
    assert answers[1] == expected[1]
    assert [answer[0] for answer in answers] == [7, 7, 7]


def test_each_request_may_have_its_own_token_rules(plain, batched):
    rules = rules_of(generated(plain))
    names = [name for name in rules if name != "all"]
    manager = batched.init_continuous_batching(GenerationConfig(**BASE))
    for name in names:
        manager.add_request(PROMPTS[0], request_id=name, **rules[name])
    with manager:
        found = {one.request_id: one.generated_tokens for one in manager}
    assert found == {name: generated(plain, **rules[name])[0] for name in names}


def test_token_rules_in_transformers_forms_become_sampling_params():
    config = GenerationConfig(
        sequence_bias={(5, 4): -math.inf, (6,): 1.5}, bad_words_ids=[[5, 4], [7]],
        no_repeat_ngram_size=0, suppress_tokens=[], forced_eos_token_id=[2, 3],
        forced_bos_token_id=0,
    )  # fmt: skip
    params = sampling_params(config)
    assert params.sequence_bias == (((5, 4), -math.inf), ((6,), 1.5))
    assert params.bad_words_ids == ((5, 4), (7,))
    assert params.no_repeat_ngram_size is None
    assert params.suppress_tokens == ()
    assert params.forced_eos_token_id == (2, 3)
    assert params.forced_bos_token_id == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bad_words_ids": [5, 4]}, "bad_words_ids cannot be read: Expected `array`, got `int`"),
        ({"sequence_bias": [[[5], "x"]]}, "sequence_bias cannot be read: Expected `float`"),
        ({"suppress_tokens": 7}, "suppress_tokens cannot be read: Expected `array`, got `int`"),
    ],
)
def test_a_token_rule_of_another_shape_is_refused_in_one_sentence(batched, fields, says):
    config = GenerationConfig(**BASE)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=says):
        sampling_params(config)
    manager = batched.init_continuous_batching()
    with pytest.raises(ValueError, match=says):
        manager.add_request([5, 6], **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bad_words_ids": [[5], []]}, "bad_words_ids[1] must have at least one id"),
        ({"suppress_tokens": [-1]}, "suppress_tokens holds -1"),
        ({"forced_bos_token_id": 10**6}, "forced_bos_token_id has id 1000000, outside"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size must be from 1 to 256, not -2"),
        (
            {"forced_eos_token_id": 7, "suppress_tokens": [7]},
            "forced_eos_token_id 7 is in suppress_tokens",
        ),
    ],
)
def test_an_impossible_token_rule_fails_its_request_alone(batched, fields, says):
    manager = batched.init_continuous_batching(GenerationConfig(**BASE))
    bad, good = manager.add_request([5, 6], **fields), manager.add_request([5, 6])
    with manager:
        found = {one.request_id: one for one in manager}
    assert (found[bad].status, found[good].status) == (RequestStatus.FAILED, RequestStatus.FINISHED)
    assert says in str(found[bad].error)
