"""Tests of vLLM's arguments, in vLLM's own environment."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.support.vllm import VLLM, needs_vllm, with_vllm
from tokenmill_worker.engines.vllm.config import INSTEAD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_vllm]
READ = """
import json, sys
from pathlib import Path
from tokenmill_worker.engines.vllm.arguments import OWNED, AsyncEngineArgs, EngineConfigError
from tokenmill_worker.engines.vllm.arguments import check_version, engine_args
from tokenmill_worker.engines.vllm.config import VllmConfig

def outcome(call, *given):
    try:
        found = call(*given)
        return f"max_lora_rank={found.max_lora_rank}" if found else "taken"
    except (EngineConfigError, OSError) as error:
        return f"refused: {error}"

asked = json.load(sys.stdin)
print(json.dumps({
    "fields": list(AsyncEngineArgs.__dataclass_fields__),
    "owned": list(OWNED),
    "args": [
        outcome(engine_args, VllmConfig(model="m", **one), Path("/tmp")) for one in asked["args"]
    ],
    "versions": [outcome(check_version, one) for one in asked["versions"]],
}))
"""
REFUSED = {
    "kv-cach-dtype=auto": "vLLM has no such argument; is kv-cache-dtype meant?",
    "nothing-like-it=1": "--engine-arg nothing-like-it: vLLM has no such argument",
    "model=/x": "--engine-arg model: use --model",
    "logprobs-mode=raw_logprobs": "--engine-arg logprobs-mode: the worker sets it",
    "disable-log-stats=true": "--engine-arg disable-log-stats: the worker sets it",
    'structured-outputs-config={"backend":"outlines"}': (
        "--engine-arg structured-outputs-config: the worker sets it"
    ),
    "enforce-eager=maybe": "--engine-arg enforce-eager: 'maybe' is neither true nor false",
    "kv-cache-dtype=int3": "--engine-arg kv-cache-dtype: invalid choice: 'int3'",
    "tensor-parallel-size=two": "--engine-arg tensor-parallel-size/-tp: invalid int value: 'two'",
}
VERSIONS = {"0.32.1": True, "0.33.0": False, "0.31.9": False, "1.0.0": False, "dev": False}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the environment of vLLM says of arguments and versions."""
    folder = tmp_path_factory.mktemp("adapters")
    for rank in (4, 33):
        (folder / str(rank)).mkdir()
        (folder / str(rank) / "adapter_config.json").write_text(json.dumps({"r": rank}))
    adapters = [
        {"adapters": f"a={folder}/4"},
        {"adapters": f"a={folder}/4,b={folder}/33"},
        {"adapters": f"a={folder}/4", "engine_arg": "max-lora-rank=128"},
        {"adapters": f"a={folder}/none"},
    ]
    asked = {"args": [{"engine_arg": one} for one in REFUSED] + adapters, "versions": [*VERSIONS]}
    done = subprocess.run(
        [VLLM, "-c", READ],
        input=json.dumps(asked),
        env=with_vllm(os.environ),  # noqa: TID251
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_each_argument_that_is_named_in_place_of_a_setting_is_one_of_vllm(
    found: dict[str, Any],
) -> None:
    named = {name.replace("-", "_") for name in INSTEAD.values()} | set(found["owned"])
    assert named - set(found["fields"]) == set()


def test_an_argument_that_cannot_be_used_is_refused_in_one_sentence(found: dict[str, Any]) -> None:
    for (given, words), said in zip(REFUSED.items(), found["args"], strict=False):
        assert said.startswith("refused: --engine-arg"), given
        assert words in said
        assert "\n" not in said


def test_the_greatest_rank_of_an_adapter_is_that_of_the_adapters(found: dict[str, Any]) -> None:
    least, greatest, given, missing = found["args"][len(REFUSED) :]
    assert "max_lora_rank=16" in least
    assert "max_lora_rank=64" in greatest
    assert "max_lora_rank=128" in given
    assert missing.startswith("refused: ")
    assert "none/adapter_config.json" in missing


def test_a_version_that_is_not_tested_is_refused_with_the_command(found: dict[str, Any]) -> None:
    for (version, is_taken), said in zip(VERSIONS.items(), found["versions"], strict=True):
        assert ("refused" not in said) == is_taken, version
        assert is_taken or "-m pip install 'vllm>=0.32,<0.33'" in said
