"""The calls of Transformers' continuous batching, argument by argument."""

import threading

import pytest
from transformers import GenerationConfig

from tests.engines.own.direct.conftest import GREEDY, LONG
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.engines.own import (
    BatchedModel,
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    EngineError,
    RequestError,
    RequestStatus,
)

CONFIG = GenerationConfig(max_new_tokens=6, eos_token_id=-1)
PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def model(llama):
    with BatchedModel.from_pretrained(str(llama), num_blocks=64) as loaded:
        yield loaded


# ── add_request ──


def test_end_tokens_of_a_request_replace_those_of_the_manager(model):
    with model.continuous_batching_context_manager(CONFIG) as manager:
        whole = manager.get_result(manager.add_request([5, 6, 7])).generated_tokens
        third = whole[2]
        for ends in (third, [third], [-1, third]):
            found = manager.get_result(manager.add_request([5, 6, 7], eos_token_id=ends))
            assert found.generated_tokens == whole[: whole.index(third) + 1]
            assert found.finish_reason is FinishReason.STOP
        ids = manager.add_requests([[5, 6, 7]] * 2, eos_token_id=third)
        assert {len(manager.get_result(name).generated_tokens) for name in ids} == {
            whole.index(third) + 1
        }


def test_sampling_fields_given_singly_equal_those_given_as_params(model):
    sampled = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": 5}
    with model.continuous_batching_context_manager(CONFIG) as manager:
        params = SamplingParams(max_tokens=6, ignore_eos=True, **sampled)
        expected = manager.get_result(manager.add_request([5, 6, 7], params=params))
        found = manager.get_result(manager.add_request([5, 6, 7], **sampled))
        greedy = manager.get_result(manager.add_request([5, 6, 7]))
    assert found.generated_tokens == expected.generated_tokens != greedy.generated_tokens


def test_an_unknown_argument_of_a_request_is_named(manager):
    with pytest.raises(TypeError, match="a request has no argument tempo, volume"):
        manager.add_request([65], volume=1, tempo=2)


# ── several choices ──


def test_num_return_sequences_gives_each_choice_its_own_result(model):
    config = GenerationConfig(
        max_new_tokens=9, do_sample=True, num_return_sequences=3, eos_token_id=-1
    )
    outputs = model.generate_batch(PROMPTS, config)
    names = [f"request-{n}{end}" for n in range(2) for end in ("__child#0", "__child#1", "")]
    assert list(outputs) == names
    assert [one.prompt_ids for one in outputs.values()] == [[5, 6, 7]] * 3 + [[8, 9]] * 3
    assert all(one.status is RequestStatus.FINISHED for one in outputs.values())
    assert len({tuple(one.generated_tokens) for one in outputs.values()}) == 6


def test_seeded_choices_equal_those_of_the_engine(model):
    params = SamplingParams(max_tokens=9, n=3, seed=7, ignore_eos=True)
    with model.continuous_batching_context_manager(CONFIG) as manager:
        manager.add_request([5, 6, 7], "a", params=params)
        found = {one.request_id: tuple(one.generated_tokens) for one in manager}
    engine = CollectingEngine.around(manager._engine.runner)
    expected = engine.generate_batch([[5, 6, 7]], params)
    assert [found[name] for name in ("a", "a__child#0", "a__child#1")] == [
        choice.token_ids for choice in expected[0].choices
    ]


@pytest.mark.parametrize("sharing", [True, False])
def test_greedy_choices_are_equal(model, sharing):
    config = GenerationConfig(max_new_tokens=30, eos_token_id=-1)
    config.num_return_sequences = 2  # Transformers refuses it beside greedy decoding
    batching = ContinuousBatchingConfig(allow_block_sharing=sharing)
    first, second = model.generate_batch([[5, 6, 7]], config, batching).values()
    assert first.generated_tokens == second.generated_tokens
    assert len(first.generated_tokens) == 30


def test_a_request_whose_choice_id_is_in_use_is_refused_and_others_continue(manager):
    manager.add_request([65], "a__child#0")
    with pytest.raises(RequestError, match="'a__child#0' is already in use"):
        manager.add_request([65], "a", n=2)
    assert [one.request_id for one in manager] == ["a__child#0"]


@pytest.mark.parametrize("n", [0, 129, 10**9, "two"])
def test_a_request_with_an_invalid_number_of_choices_fails_alone(manager, n):
    failed = manager.get_result(manager.add_request([65], n=n))
    assert failed.status is RequestStatus.FAILED
    assert manager.get_result(manager.add_request([65])).status is RequestStatus.FINISHED


def test_a_bad_prompt_fails_each_choice(manager):
    manager.add_request("text", "bad", n=3)
    found = {one.request_id: one.status for one in manager}
    assert found == dict.fromkeys(("bad", "bad__child#0", "bad__child#1"), RequestStatus.FAILED)


# ── the manager ──


def test_a_hard_stop_cancels_running_requests(manager):
    manager.add_request([65], "long", max_new_tokens=LONG)
    manager.stop(keep_for_next_session=True, hard_stop=True)
    assert not manager.is_running()
    assert manager.get_result("long").status is RequestStatus.CANCELLED


def test_destroy_stops_a_manager_in_any_state(engine):
    idle = ContinuousBatchingManager(engine, GREEDY)
    idle.destroy()
    idle.destroy()
    with ContinuousBatchingManager(engine, GREEDY) as manager:
        manager.add_request([65], "kept")
        manager.destroy()
        assert not manager.is_running()
        assert manager.get_result("kept").status is RequestStatus.FINISHED
        with pytest.raises(EngineError, match="stopping"):
            manager.add_request([65])


@pytest.fixture
def counted(llama):
    with BatchedModel.from_pretrained(str(llama), num_blocks=64) as loaded:
        manager = loaded.init_continuous_batching(CONFIG)
        runner, launched = manager._engine.runner, []
        launch = runner.launch
        runner.launch = lambda plan: (launched.append(plan), launch(plan))[1]
        yield loaded, launched


def test_a_warm_up_runs_steps_and_keeps_no_blocks(counted):
    model, launched = counted
    manager = model.init_continuous_batching(CONFIG)
    manager.warmup()
    assert len(launched) == 4
    assert manager._engine.capacity().free_blocks == 64


@pytest.mark.parametrize("warmup", [True, False])
def test_batches_warm_up_once_unless_warmup_is_false(counted, warmup):
    model, launched = counted
    for _ in range(2):
        model.generate_batch([[5, 6, 7]], CONFIG, warmup=warmup)
    assert len(launched) == 2 * 6 + 4 * warmup


def test_a_running_manager_warms_up_between_two_steps(counted):
    model, launched = counted
    with model.continuous_batching_context_manager(CONFIG, warmup=False) as manager:
        manager.add_request([5, 6, 7], "running", max_new_tokens=100)
        manager.warmup()
        assert len(manager.get_result("running").generated_tokens) == 100
    assert len(launched) == 104


# ── the model ──


def test_a_batch_accepts_a_length_timestamps_and_no_prompts(model):
    assert model.generate_batch([], CONFIG) == {}
    outputs = model.generate_batch(PROMPTS, CONFIG, record_timestamps=True, max_new_tokens=3)
    assert [len(one.timestamps) for one in outputs.values()] == [3, 3]
    assert all(len(one.generated_tokens) == 3 for one in outputs.values())


@pytest.mark.parametrize("persistent_manager", [True, False])
def test_the_engine_and_its_cached_prefixes_persist_between_batches(llama, persistent_manager):
    prompt = list(range(5, 60))
    with BatchedModel.from_pretrained(str(llama), num_blocks=64) as model:
        first, second = (
            model.generate_batch([prompt], CONFIG, persistent_manager=persistent_manager)
            for _ in range(2)
        )
        assert [one.num_cached_tokens for one in first.values()] == [0]
        assert [one.num_cached_tokens for one in second.values()] == [48]
        model.destroy_cached_continuous_batching_manager()
        assert model._engine is None


def test_a_context_with_block_false_leaves_its_requests_running(model):
    held = threading.Event()
    with model.continuous_batching_context_manager(CONFIG, block=False) as manager:
        manager.add_request([5, 6, 7], "long", max_new_tokens=200, streaming=True)
        manager.register_result_handler("long", lambda _: held.wait(20))
    assert manager.is_running()
    held.set()
    manager.join(20)
    assert not manager.is_running()


def test_a_context_waits_for_its_requests_no_longer_than_its_timeout(model):
    held = threading.Event()
    with model.continuous_batching_context_manager(CONFIG, True, 0.05) as manager:
        manager.add_request([5, 6, 7], "long", max_new_tokens=200, streaming=True)
        manager.register_result_handler("long", lambda _: held.wait(20))
    assert manager.is_running()
    held.set()
    manager.join(20)


def test_an_exception_in_a_context_cancels_unfinished_requests(model):
    def leave():
        with model.continuous_batching_context_manager(CONFIG) as manager:
            manager.add_request([5, 6, 7], "long", max_new_tokens=200)
            raise KeyError(manager)

    with pytest.raises(KeyError) as raised:
        leave()
    (manager,) = raised.value.args
    assert manager.get_result("long").status is RequestStatus.CANCELLED


def test_a_workload_hint_limits_the_requests_of_a_step(model):
    class Hints:
        num_requests = 3
        max_prompt_length = 10

    with model.continuous_batching_context_manager(CONFIG, workload_hints=Hints) as manager:
        assert manager._engine.runner.info.config.max_num_seqs == 3
        assert len([manager.get_result(name) for name in manager.add_requests(PROMPTS * 4)]) == 8
