"""The guide of the engine runs as it stands; a model that one holds answers as its `generate`."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tokenmill_worker.engines.own import BatchedModel, ContinuousBatchingConfig, EngineError
from tokenmill_worker.engines.own.direct import batched_model
from tokenmill_worker.engines.own.direct.batched_model import sampling_params

GUIDE = Path(__file__).parents[4] / "ops" / "guides" / "engine.md"
PROMPTS = [[5, 6, 7], [8, 9], list(range(10, 60))]
CONFIG = GenerationConfig(max_new_tokens=12, eos_token_id=2)


@pytest.mark.timeout(120)
def test_every_block_of_the_guide_runs(llama, capsys):
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 8
    names = {"path": str(llama)}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    assert len(names["outputs"]) == 3
    assert "FINISHED" not in capsys.readouterr().err


def generated(model):
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        full = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=CONFIG)
        answers.append(full[0, len(prompt) :].tolist())
    return answers


@pytest.mark.timeout(120)
def test_a_wrapped_model_answers_as_its_generate_before_and_after_a_weight_change(llama):
    def changed(model):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-2)
        return model

    fresh = [AutoModelForCausalLM.from_pretrained(llama, dtype="float32") for _ in range(2)]
    before, after = generated(fresh[0]), generated(changed(fresh[1]))
    held = AutoModelForCausalLM.from_pretrained(llama, dtype="float32")
    with BatchedModel.from_model(held, num_blocks=64) as model:
        outputs = model.generate_batch(PROMPTS, CONFIG)
        assert [one.generated_tokens for one in outputs.values()] == before
        with model.continuous_batching_context_manager(CONFIG) as manager:
            with pytest.raises(EngineError, match="stop it first"):
                model.init_continuous_batching()
            with manager.pause():
                changed(held)
            ids = manager.add_requests(PROMPTS)
            found = {one.request_id: one.generated_tokens for one in manager}
    assert before != after
    assert [found[name] for name in ids] == after


def test_a_batch_keeps_the_order_and_shows_a_progress_bar(llama, capsys):
    with BatchedModel.from_pretrained(str(llama), num_blocks=64) as model:
        prompts = [[65 + n] * (1 + n) for n in range(9, 0, -1)]
        outputs = model.generate_batch(prompts, CONFIG, progress_bar=True)
        assert list(outputs) == [f"request-{n}" for n in range(9)]
        assert "9/9" in capsys.readouterr().err
        config = ContinuousBatchingConfig(return_logprobs=True)
        (output,) = model.generate_batch([[65]], CONFIG, config).values()
        assert len(output.logprobs) == len(output.generated_tokens)


def test_unsupported_generation_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match="num_beams=4"):
        sampling_params(GenerationConfig(num_beams=4))
    with pytest.raises(ValueError, match=r"max_time=3\.0, guidance_scale=1\.5$"):
        sampling_params(GenerationConfig(max_time=3.0, guidance_scale=1.5, num_beams=1))
    assert sampling_params(None).max_tokens == 20
    sampled = sampling_params(GenerationConfig(do_sample=True, top_k=7, eos_token_id=[2, 3]))
    assert (sampled.top_k, sampled.stop_token_ids, sampled.ignore_eos) == (7, (2, 3), True)


def refusal(**fields):
    config = GenerationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    try:
        sampling_params(config)
    except ValueError as error:
        return str(error)
    return ""


def test_no_field_of_a_generation_config_is_silently_ignored():
    """Each is taken, refused, or changes no answer; a later Transformers may add some."""
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    refused = {name for name in names if f" {name}=7" in refusal(**{name: 7})}
    assert names - refused == batched_model._TAKEN | batched_model._WITHOUT_EFFECT
    assert len(refused) > 35
    assert not refusal(max_length=7, max_new_tokens=7)


@pytest.mark.timeout(120)
def test_a_pause_commits_the_step_in_flight_and_changes_no_token(llama):
    config = GenerationConfig(max_new_tokens=150, eos_token_id=-1)
    with BatchedModel.from_pretrained(str(llama), num_blocks=64) as plain:
        (expected,) = plain.generate_batch([[5, 6, 7]], config).values()
    with (
        BatchedModel.from_pretrained(str(llama), num_blocks=64, async_batching=True) as model,
        model.continuous_batching_context_manager(config) as manager,
    ):
        manager.add_request([5, 6, 7], "running", streaming=True)
        next(manager.request_id_iter("running"))
        for _ in range(5):
            with manager.pause():
                assert not model._engine._steps.has_in_flight
        *_, output = manager.request_id_iter("running")
    assert output.generated_tokens == expected.generated_tokens


@pytest.mark.timeout(120)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged|sdpa"])
def test_a_wrapped_model_gets_its_attention_back(llama, attention):
    held = AutoModelForCausalLM.from_pretrained(llama, dtype="float32")
    held.set_attn_implementation(attention)
    before = held.config._attn_implementation
    with BatchedModel.from_model(held, num_blocks=64) as model:
        model.generate_batch(PROMPTS, CONFIG)
        assert held.config._attn_implementation != before
    assert held.config._attn_implementation == before


@pytest.mark.timeout(120)
def test_return_logprobs_gives_the_logprobs_of_the_sampled_distribution(llama):
    config = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, eos_token_id=-1)
    with BatchedModel.from_pretrained(str(llama), num_blocks=64) as model:
        batching = ContinuousBatchingConfig(return_logprobs=True)
        outputs = model.generate_batch(PROMPTS, config, batching)
    for output in outputs.values():
        assert output.logprobs == [0.0] * 8  # one token is left, with all of the probability
