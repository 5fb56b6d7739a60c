"""A batch has the tokens of Transformers' `generate`, however cache, scheduling and logits are set.

Beside test_streams.py, test_pause.py and test_calls.py this restates what Transformers' own tests
ask of continuous batching.
"""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import logits_process

from tokenmill_worker.engines.own import BatchedModel, ContinuousBatchingConfig, RequestStatus

PROMPTS = [[5, 6, 7], [8, 9], list(range(10, 44)), [50, 50, 50, 51]]
GREEDY = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}


def generate(model, prompts, **fields):
    """Return what `generate` gives to each prompt alone, and the log-probabilities of its draws."""
    config = GenerationConfig(
        **{**GREEDY, **fields}, output_scores=True, return_dict_in_generate=True
    )
    tokens, logprobs = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        answer = found.sequences[0, len(prompt) :]
        tokens.append(answer.tolist())
        scores = torch.stack(found.scores, dim=1)[0].log_softmax(-1)
        logprobs.append(scores.gather(1, answer[:, None]).squeeze(1).tolist())
    return tokens, logprobs


@pytest.fixture(scope="module", params=["llama"])
def folder(request, folder_of):
    return folder_of(request.param)


@pytest.fixture(scope="module")
def plain(folder):
    return loaded(folder)


def loaded(folder, attention="sdpa"):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation=attention
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def batch(folder, prompts=PROMPTS, batching=None, config=None, **settings):
    settings = {"num_blocks": 64, "dtype": "float32", "block_size": 16, **settings}
    with BatchedModel.from_pretrained(str(folder), **settings) as model:
        config = config or GenerationConfig(**{**GREEDY, "eos_token_id": -1})
        outputs = list(model.generate_batch(prompts, config, batching).values())
        assert all(one.status is RequestStatus.FINISHED for one in outputs), outputs
        return outputs, model._engine.stats()


def tokens_of(outputs):
    return [one.generated_tokens for one in outputs]


# ── cache and attention ──


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_each_attention_backend_with_and_without_sharing_gives_generate_s_tokens(
    folder, plain, sharing, attention
):
    batching = ContinuousBatchingConfig(allow_block_sharing=sharing, use_cuda_graph=False)
    outputs, _ = batch(folder, batching=batching, attention=attention)
    assert tokens_of(outputs) == generate(plain, PROMPTS)[0]


def test_without_an_accelerator_the_cpu_gives_generate_s_tokens(folder, plain, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outputs, _ = batch(folder, device="auto")
    assert tokens_of(outputs) == generate(plain, PROMPTS)[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_prompts_around_a_sliding_window_give_generate_s_tokens(folder_of, family):
    """Windows of 9 and 10 tokens: within, crossed by the answer, and crossed by the prompt."""
    folder = folder_of(family)
    attention = "eager" if family == "gemma2" else "sdpa"
    prompts = [list(range(5, 5 + length)) for length in (3, 8, 9, 10, 11, 40)]
    outputs, _ = batch(folder, prompts)
    assert tokens_of(outputs) == generate(loaded(folder, attention), prompts)[0]


def test_a_wide_batch_of_decodes_gives_generate_s_tokens(folder, plain):
    prompts = PROMPTS * 4
    outputs, _ = batch(folder, prompts)
    assert tokens_of(outputs) == generate(plain, PROMPTS)[0] * 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("async_batching", [False, True])
@pytest.mark.parametrize("space", [0.0, 0.01])
def test_preemption_for_lack_of_blocks_changes_no_token(folder, plain, space, async_batching):
    batching = ContinuousBatchingConfig(
        num_blocks=6, page_size=16, safety_margin=0, cpu_offload_space=space,
        use_async_batching=async_batching,
    )  # fmt: skip
    config = GenerationConfig(max_new_tokens=60, eos_token_id=-1)
    outputs, stats = batch(folder, PROMPTS * 2, batching, config, max_model_len=95)
    assert tokens_of(outputs) == generate(plain, PROMPTS, max_new_tokens=60)[0] * 2
    assert stats.preemptions > 0
    assert (stats.blocks_swapped_out > 0) is (space > 0)


@pytest.mark.parametrize("async_batching", [False, True])
def test_steps_planned_ahead_give_generate_s_tokens(folder, plain, async_batching):
    batching = ContinuousBatchingConfig(
        use_async_batching=async_batching, use_cuda_graph=False, return_logprobs=True
    )
    outputs, _ = batch(folder, batching=batching)
    tokens, logprobs = generate(plain, PROMPTS)
    assert tokens_of(outputs) == tokens
    for output, expected in zip(outputs, logprobs, strict=True):
        assert output.logprobs == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("family", "hits"), [("llama", 160), ("gemma3", 96)])
def test_a_repeated_prompt_hits_the_cache_in_whole_pages(folder_of, family, hits):
    """Beside sliding windows too, in larger units; Transformers shares nothing there."""
    prompt, pages = list(range(5, 175)), ContinuousBatchingConfig(page_size=32)
    config = GenerationConfig(max_new_tokens=32, eos_token_id=-1)
    folder = folder_of(family)
    with BatchedModel.from_pretrained(str(folder), num_blocks=64, dtype="float32") as model:
        first, second = (
            model.generate_batch([prompt], config, pages)["request-0"] for _ in range(2)
        )
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, hits)
    assert first.generated_tokens == second.generated_tokens
    assert [first.generated_tokens] == generate(loaded(folder), [prompt], max_new_tokens=32)[0]


# ── a model that one holds ──


def test_a_wrapped_model_called_outside_of_a_step_raises(folder):
    held = loaded(folder)
    with BatchedModel.from_model(held, num_blocks=64) as model:
        model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=2, eos_token_id=-1))
        with pytest.raises(RuntimeError, match="outside of a step of the engine"):
            held(torch.tensor([PROMPTS[0]]))


# ── logits ──

PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [2, *range(100, 200)]},
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("async_batching", [False, True])
def test_logits_processors_give_generate_s_tokens(folder, plain, name, async_batching):
    """test_generation_config.py has sequences, n-grams and forced tokens."""
    expected, _ = generate(plain, PROMPTS, **PROCESSORS[name])
    assert expected != generate(plain, PROMPTS)[0]
    config = GenerationConfig(**{**GREEDY, "eos_token_id": -1, **PROCESSORS[name]})
    batching = ContinuousBatchingConfig(use_async_batching=async_batching)
    outputs, _ = batch(folder, batching=batching, config=config)
    assert tokens_of(outputs) == expected


def test_each_request_s_parameters_act_as_in_generate(folder, plain):
    """Several requests at once, each with its own processors and log-probabilities of its own."""
    kinds = [
        {"temperature": t, "top_k": k, "top_p": p}
        for t, (k, p) in itertools.product((0.5, 1.0), ((10, 0.9), (50, 0.99)))
    ]
    batching = ContinuousBatchingConfig(return_logprobs=True, per_request_processors=True)
    config = GenerationConfig(max_new_tokens=8, do_sample=True, eos_token_id=-1)
    with BatchedModel.from_pretrained(str(folder), num_blocks=64, dtype="float32") as model:
        manager = model.init_continuous_batching(config, batching)
        ids = [manager.add_request([5, 6, 7], seed=n, **kind) for n, kind in enumerate(kinds)]
        manager.start()
        outputs = [manager.get_result(name) for name in ids]
        manager.stop()
    for output, kind in zip(outputs, kinds, strict=True):
        expected = processed_logprobs(plain, [5, 6, 7], output.generated_tokens, kind)
        assert output.logprobs == pytest.approx(expected, abs=1e-4)
    assert len({tuple(one.logprobs) for one in outputs}) == len(kinds)


@torch.inference_mode()
def processed_logprobs(model, prompt, answer, kind):
    """Return the answer's log-probabilities after Transformers' own warpers."""
    ids = torch.tensor([[*prompt, *answer]])
    scores = model(ids).logits[0, len(prompt) - 1 : -1]
    for warp in (
        logits_process.TemperatureLogitsWarper(kind["temperature"]),
        logits_process.TopKLogitsWarper(kind["top_k"]),
        logits_process.TopPLogitsWarper(kind["top_p"]),
    ):
        scores = warp(None, scores)
    chosen = torch.tensor(answer)[:, None]
    return scores.log_softmax(-1).gather(1, chosen).squeeze(1).tolist()
