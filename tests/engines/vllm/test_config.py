"""Tests of the settings and abilities of vLLM, which a worker reads without vLLM."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.engine_kind import EngineConfigError
from tokenmill_worker.engines.vllm.config import KIND, VllmConfig, capabilities_of
from tokenmill_worker.engines.vllm.serve import _reason
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings import load_settings


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_num_seqs": -5}, "max_num_seqs must not be negative, not -5"),
        ({"max_loras": 0}, "max_loras must be at least 1, not 0"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"adapters": "a"}, "adapters must be name=folder"),
        ({"model": ""}, "model must not be empty"),
    ],
)
def test_a_value_that_cannot_work_is_refused_before_vllm_is_imported(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineConfigError, match=words):
        VllmConfig(**{"model": "m", **fields})


def test_a_setting_of_our_engine_is_refused_by_name_beside_vllm() -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"engine": "vllm", "model": "/m", "quantization": "int8"})
    assert any(
        "--quantization is a setting of the engine own; this worker's engine is vllm" in line
        for line in refused.value.problems
    )


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(temperature=3.0), "temperature must be between 0 and 2"),
        (SamplingParams(no_repeat_ngram_size=2), "no_repeat_ngram_size is not available"),
        (SamplingParams(forced_bos_token_id=5), "forced_bos_token_id is not available"),
    ],
)
def test_a_parameter_that_vllm_lacks_is_refused_by_name(params: SamplingParams, words: str) -> None:
    (problem,) = KIND.capabilities.problems(params)
    assert words in problem
    assert not KIND.capabilities.problems(SamplingParams(temperature=1.0, suppress_tokens=(4,)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_dtype": "float16"}, "is vllm: say --engine-arg kv-cache-dtype=…"),
        ({"quantization": "int8"}, "is vllm: say --engine-arg quantization=…"),
        ({"verify_model": False}, "--verify-model is a setting of the engine own; this worker's"),
    ],
)
def test_a_setting_that_vllm_lacks_is_refused_with_the_argument_that_does_the_same(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        load_settings({"engine": "vllm", "model": "/m", **given})


def test_beside_drafts_what_vllm_makes_of_biases_is_refused() -> None:
    found = capabilities_of(
        has_grammars=True, has_adapters=True, has_position_seeds=True, has_drafts=True
    )
    (problem,) = found.problems(SamplingParams(min_p=0.1))
    assert problem == "min_p is not available on the engine of this queue"
    assert len(found.problems(SamplingParams(logit_bias={1: 1.0}, suppress_tokens=(5,)))) == 2
    assert not found.problems(SamplingParams(frequency_penalty=1.0))


def test_a_worker_reads_the_kind_without_vllm_and_torch() -> None:
    code = (
        "import sys, tokenmill_worker.engines.vllm.config\n"
        "print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class _Model(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _refuse(cls, name: str) -> str:
        raise ValueError(f"Model architectures ['{name}'] are not supported.")


def test_a_reason_of_vllm_s_validation_is_the_sentence_alone() -> None:
    with pytest.raises(ValidationError) as refused:
        _Model(name="Nope")
    assert _reason(refused.value) == "Model architectures ['Nope'] are not supported."
    assert _reason(RuntimeError("no device")) == "RuntimeError: no device"
