"""The engine's public calls on the model-free runner: every answer is that of a lone run."""

import pytest

from tests.engines.own.scheduler.integrity import check_integrity
from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.messages import Mailbox, Ready, Stop
from tokenmill_worker.contract.requests import Prompt
from tokenmill_worker.engines.own import (
    EngineConfig,
    EngineConfigError,
    GenerationRequest,
    RequestError,
)
from tokenmill_worker.engines.own.errors import EngineError, is_device_lost
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.serve.loop import EngineLoop
from tokenmill_worker.engines.synthetic.runner import END_OF_TEXT, SyntheticRunner

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def config(**changes):
    return EngineConfig(
        **({"model": "synthetic", "num_blocks": 64, "block_size": 8, "max_num_seqs": 8} | changes)
    )


def engine_of(config):
    return CollectingEngine.around(SyntheticRunner.load(config))


@pytest.fixture
def engine():
    with engine_of(config()) as loaded:
        yield loaded


def lone(prompt, params=GREEDY):
    """Return the answer of an engine that runs nothing else."""
    with engine_of(config(num_blocks=512)) as alone:
        return alone.generate_batch([prompt], [params])[0]


PROMPTS = [[65 + i, 66, 67 + i] * (1 + 3 * i) for i in range(12)]


def test_a_batch_is_returned_in_order_with_the_answers_of_single_runs(engine):
    outputs = engine.generate_batch(PROMPTS, [GREEDY] * len(PROMPTS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == lone(prompt).token_ids
        assert output.num_prompt_tokens == len(prompt)
        assert output.finish_reason is FinishReason.LENGTH
    check_integrity(engine.scheduler)


def test_requests_that_join_at_any_step_get_the_answers_of_single_runs(engine):
    waiting = list(enumerate(PROMPTS))
    outputs = {}
    while waiting or engine.has_work:
        if waiting:
            index, prompt = waiting.pop()
            engine.add_request(prompt, GREEDY, str(index))
        for event in engine.step():
            outputs[int(event.request_id)] = (
                outputs.get(int(event.request_id), ()) + event.token_ids
            )
    assert outputs == {index: lone(prompt).token_ids for index, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancel_in_every_state_gives_a_result_and_frees_the_blocks(engine, steps):
    request_id = engine.add_request(PROMPTS[11], GREEDY)
    for _ in range(steps):
        engine.step()
    assert engine.cancel(request_id)
    assert not engine.cancel(request_id)
    assert engine.result(request_id).finish_reason is FinishReason.CANCELLED
    engine.step()
    assert engine.stats().blocks_free == engine.stats().blocks_total
    check_integrity(engine.scheduler)


def test_a_duplicate_id_is_refused_and_the_first_request_continues(engine):
    for prompt in PROMPTS[:2]:
        engine.submit(
            [GenerationRequest(request_id="twin", prompt=Prompt(tuple(prompt)), params=GREEDY)]
        )
    refusal, *events = engine.step()
    assert refusal.error == "request id 'twin' is already in use"
    while engine.has_work:
        events += engine.step()
    tokens = tuple(token for event in events for token in event.token_ids)
    assert tokens == lone(PROMPTS[0]).token_ids


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([], {}),
        ([999], {}),
        ([65], {"max_tokens": 5000}),
        ([65] * 600, {"max_tokens": 1}),
        ([65], {"top_k": -5}),
    ],
)
def test_an_impossible_request_is_refused_and_others_continue(engine, prompt, params):
    engine.submit(
        [
            GenerationRequest(
                request_id="bad", prompt=Prompt(tuple(prompt)), params=SamplingParams(**params)
            )
        ]
    )
    (event,) = engine.step()
    assert event.finish_reason is FinishReason.ERROR
    assert event.error
    assert engine.generate_batch([PROMPTS[0]], GREEDY)[0].token_ids == lone(PROMPTS[0]).token_ids


def test_a_failing_step_fails_only_the_request_that_causes_it(engine):
    guilty = list(b"please [[fail]] here")
    prompts = [*PROMPTS[:3], guilty, *PROMPTS[3:6]]
    outputs = engine.generate_batch(prompts, GREEDY)
    assert [output.finish_reason for output in outputs].count(FinishReason.ERROR) == 1
    assert outputs[3].error is not None
    assert "breaks the step" in outputs[3].error
    for prompt, output in zip(prompts, outputs, strict=True):
        if prompt is not guilty:
            assert output.token_ids == lone(prompt).token_ids
    assert engine.stats().failed_steps > 0
    check_integrity(engine.scheduler)


def test_stop_tokens_and_the_end_token_end_an_answer(engine):
    whole = lone(
        PROMPTS[0], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    ).token_ids
    stop = whole[7]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
    output = engine.generate_batch([PROMPTS[0]], [params])[0]
    assert output.token_ids == whole[: whole.index(stop) + 1]
    assert output.finish_reason is FinishReason.STOP
    ended = engine.generate_batch([PROMPTS[0]], SamplingParams(max_tokens=400, temperature=0))[0]
    assert ended.finish_reason is FinishReason.STOP
    assert ended.token_ids[-1] == END_OF_TEXT


def test_a_resumed_answer_continues_with_the_same_tokens(engine):
    whole = lone(PROMPTS[2]).token_ids
    engine.submit(
        [
            GenerationRequest(
                request_id="r",
                prompt=Prompt(tuple(PROMPTS[2])),
                params=GREEDY,
                resumed=(whole[:13],),
            )
        ]
    )
    tokens = []
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
    assert tuple(tokens) == whole[13:]


def test_choices_of_a_request_share_the_prompt_and_differ(engine):
    params = SamplingParams(max_tokens=10, n=3, seed=4, ignore_eos=True)
    output = engine.generate_batch([PROMPTS[8]], params)[0]
    assert len({choice.token_ids for choice in output.choices}) == 3
    assert output.token_ids == output.choices[0].token_ids
    assert engine.stats().computed_tokens < 2 * len(PROMPTS[8])


def test_stop_without_draining_cancels_every_request():
    engine = engine_of(config())
    ids = engine.add_requests(PROMPTS, GREEDY)
    engine.step()
    engine.stop(drain=False)
    reasons = {engine.result(request_id).finish_reason for request_id in ids}
    assert reasons == {FinishReason.CANCELLED}


def test_a_cancel_does_not_end_a_later_request_with_the_same_id(engine):
    engine.add_request(PROMPTS[0], GREEDY, "a")
    engine.step()
    engine.cancel("a")
    assert [event.finish_reason for event in engine.step()] == [FinishReason.CANCELLED]
    engine.add_request(PROMPTS[1], GREEDY, "a")
    assert engine.result("a").token_ids == lone(PROMPTS[1]).token_ids


def test_a_deadline_that_passes_during_a_step_ends_its_request_before_the_next_one():
    clock = [100.0]
    runner = SyntheticRunner.load(config())
    scheduler = Scheduler(
        runner.info.config, runner.info.cache_config, max_model_len=256,
        eos_token_ids=runner.info.eos_token_ids, clock=lambda: clock[0],
    )  # fmt: skip
    with CollectingEngine(runner, scheduler) as engine:
        engine.add_request(PROMPTS[0], GREEDY, "due", deadline=105.0)
        assert [event.finish_reason for event in engine.step()] == [None]
        clock[0] = 106.0
        assert [event.finish_reason for event in engine.step()] == [FinishReason.EXPIRED]
        assert not engine.has_work


def test_adding_requests_together_takes_a_time_that_grows_with_their_number():
    """Each request is looked up once, not once per other one; look-ups are counted, not timed."""
    compared = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    with engine_of(config()) as many:
        names = [Name(f"name-{number}") for number in range(500)]
        many.submit(
            [
                GenerationRequest(request_id=name, prompt=Prompt((1, 2, 3)), params=GREEDY)
                for name in names
            ]
        )
        assert compared < 20 * len(names)
        many.stop(drain=False)


@pytest.mark.parametrize("max_model_len", [None, 4096])
def test_a_pinned_pool_cuts_the_longest_sequence_and_logs_it(max_model_len, caplog):
    """A request without max_tokens gets the rest of the engine's length: that must fit the pool."""
    with caplog.at_level("INFO", "tokenmill_worker.engines.own"):
        engine = engine_of(config(block_size=16, max_model_len=max_model_len))
    assert (
        "The longest sequence has 1025 tokens, not 4096: the cache, of 64 blocks, holds no longer "
        "one. Raise max_memory_percent or max_memory_gib for a larger cache"
    ) in caplog.text
    reports = []
    mailbox = Mailbox()
    mailbox.put(Stop())
    EngineLoop(engine, mailbox, reports.append).run()
    (ready,) = [report for report in reports if isinstance(report, Ready)]
    assert ready.max_model_len == ready.capacity.max_model_len == 1025
    rest = SamplingParams(max_tokens=ready.max_model_len - 3, ignore_eos=True)
    output = engine.generate_batch([[1, 2, 3]], rest)[0]
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 1022)
    with pytest.raises(RequestError, match="1025"):
        engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=1023))


def test_a_threshold_above_the_models_length_is_refused_at_the_start():
    with pytest.raises(
        EngineConfigError, match=r"long_prefill_token_threshold \(300\) exceeds .* 256"
    ):
        engine_of(config(model="synthetic?length=256", long_prefill_token_threshold=300))


class BrokenRunner(SyntheticRunner):
    """Every step fails from the third on."""

    __slots__ = ()
    message = "CUDA error: misaligned address"
    answers = True

    def finish(self, plan):
        if plan.step_id >= 3:
            raise RuntimeError(self.message)
        return super().finish(plan)

    def is_alive(self):
        return self.answers


class Unheard(BrokenRunner):
    """Fails with an unknown exception."""

    __slots__ = ()
    message = "CUDA error: a text of a later release"
    answers = False


@pytest.mark.parametrize("kind", [BrokenRunner, Unheard])
def test_a_lost_device_is_an_engine_error_and_fails_no_request(kind):
    engine = CollectingEngine.around(kind.load(config()))
    engine.add_requests(PROMPTS[:4], GREEDY)
    events = []
    with pytest.raises(EngineError, match="device is lost"):
        events.extend(event for _ in range(20) for event in engine.step())
    assert not [event for event in events if event.finish_reason is not None]
    engine.runner.close()


@pytest.mark.parametrize(
    "words",
    [
        "an illegal memory access was encountered", "misaligned address",
        "an illegal instruction was encountered", "unknown error", "invalid program counter",
        "the launch timed out and was terminated", "hardware stack error",
        "uncorrectable NVLink error detected during the execution",
        "uncorrectable ECC error encountered", "device-side assert triggered",
        "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    ],
)  # fmt: skip
def test_a_lost_device_is_recognised_by_its_messages(words):
    assert is_device_lost(
        RuntimeError(f"CUDA error: {words}\nCUDA kernel errors might be reported later.")
    )


@pytest.mark.parametrize(
    "error", ["CUDA out of memory. Tried to allocate 2.00 GiB", "an unknown error in a grammar"]
)
def test_errors_that_a_device_survives_are_not_taken_for_its_loss(error):
    assert not is_device_lost(RuntimeError(error))
