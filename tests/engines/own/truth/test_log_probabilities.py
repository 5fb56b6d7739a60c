"""Log-probabilities of both modes beside `output_logits` and `output_scores` of Transformers' own
`generate`, which samples with the same parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

from tests.engines.own.truth import expected
from tests.engines.own.truth.test_real_models import TEXT, folder_of
from tests.support.collecting_engine import CollectingEngine
from tests.support.marks import long_unless
from tokenmill_schemas.generation import LOGPROBS_MODES, SamplingParams
from tokenmill_worker.engines.own import EngineConfig

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = "smollm2-135m-instruct"
TOLERANCE = 2e-5
# For tokens that are rarely drawn: over the five most likely tokens, Transformers' float32 itself
# was up to 4e-5 away from its float64. Temperature and penalty multiply such differences of
# logits.
NOISE = 1e-4
NUM_TOKENS = 12
KINDS = {
    "temperature": {"temperature": 0.5},
    "nucleus": {"temperature": 0.5, "top_p": 0.9},
    "top-k": {"temperature": 0.5, "top_k": 20, "top_p": 0.95},
    "penalty": {"temperature": 0.5, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[CollectingEngine]:
    """An engine with the torch operators that Transformers uses."""
    config = EngineConfig(
        model=str(folder_of(MODEL)), dtype="float32", device="cpu", num_blocks=64,
        attention="reference", fuse=False, amx=False,
    )  # fmt: skip
    with CollectingEngine.load(config) as made:
        yield made


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return expected.load(folder_of(MODEL))


@torch.inference_mode()
def distributions(
    model: transformers.PreTrainedModel,
    ids: list[int],
    params: dict[str, Any],
    cache: transformers.DynamicCache,
) -> dict[str, torch.Tensor]:
    """Return the log-probabilities of the next token, by mode; the cache has tokens before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(  # type: ignore[operator]
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=1,
            do_sample=True,
            pad_token_id=0,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
            past_key_values=cache,
            **({"top_k": 0} | params),
        )
    values = {"raw_logprobs": output.logits[0][0], "processed_logprobs": output.scores[0][0]}
    return {mode: logits.log_softmax(-1) for mode, logits in values.items()}


@pytest.mark.parametrize("kind", long_unless(KINDS.keys() - {"nucleus"}, KINDS))
def test_raw_and_processed_log_probabilities_equal_transformers(
    kind: str, engine: CollectingEngine, model: transformers.PreTrainedModel
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder_of(MODEL))
    prompt: list[int] = tokenizer(TEXT)["input_ids"][:20]
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        seed=11,
        logprobs=5,
        ignore_eos=True,
        **KINDS[kind],  # type: ignore[arg-type]
    )
    outputs = {
        mode: engine.generate_batch([prompt], replace(params, logprobs_mode=mode))[0]
        for mode in LOGPROBS_MODES
    }
    tolerance = TOLERANCE if kind == "temperature" else NOISE
    answer = outputs["raw_logprobs"].token_ids
    assert outputs["processed_logprobs"].token_ids == answer
    cache = transformers.DynamicCache()
    for index in range(NUM_TOKENS):
        wanted = distributions(model, [*prompt, *answer[:index]], KINDS[kind], cache)
        assert cache.get_seq_length() == len(prompt) + index
        for mode, values in wanted.items():
            logprobs = outputs[mode].logprobs
            assert logprobs is not None
            entry = logprobs[index]
            assert entry.logprob == pytest.approx(float(values[answer[index]]), abs=tolerance)
            best = values.topk(5).values
            assert [value for _, value in entry.top] == pytest.approx(
                best[best.isfinite()].tolist(), abs=NOISE
            )


def test_a_request_that_names_no_mode_gets_raw_log_probabilities(engine: CollectingEngine) -> None:
    base = {"max_tokens": 8, "seed": 3, "temperature": 0.5, "logprobs": True, "ignore_eos": True}
    params = SamplingParams(**base)  # type: ignore[arg-type]
    named = [replace(params, logprobs_mode=mode) for mode in LOGPROBS_MODES]
    unnamed, raw, processed = engine.generate_batch([[1, 2, 3]] * 3, [params, *named])
    assert unnamed.token_ids == raw.token_ids == processed.token_ids
    assert unnamed.logprobs == raw.logprobs != processed.logprobs
