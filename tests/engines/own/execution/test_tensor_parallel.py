"""Two gloo ranks give the tokens of one: rank 0 plans, the other follows, also through preemption
and offload.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill_worker.local.valkey_server import free_port

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROMPTS = [
    [(7 * i + j) % 120 + 1 for j in range(length)] for i, length in enumerate((3, 9, 17, 26, 5, 11))
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
        eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("split") / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def generated_alone(path):
    from ops.benchmarks.measure.collecting_engine import CollectingEngine
    from tokenmill_worker.engines.own import EngineConfig, SamplingParams

    config = EngineConfig(
        model=str(path), dtype="float32", device="cpu", num_blocks=256, block_size=4, num_threads=1
    )
    engine = CollectingEngine.load(config)
    outputs = engine.generate_batch(
        PROMPTS, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    )
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_two_ranks_give_the_tokens_of_one(model_path, mode):
    script = Path(__file__).with_name("tensor_parallel_ranks.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        f"--master_port={free_port()}",
        str(script), str(model_path), json.dumps(PROMPTS), mode,
    ]  # fmt: skip
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root)}  # noqa: TID251 - a child's
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=root, env=environment
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("TOKENS ")]
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(lines) == 1
    assert json.loads(lines[0].removeprefix("TOKENS ")) == generated_alone(model_path)
    graphs = [line for line in run.stdout.splitlines() if line.startswith("GRAPHS ")]
    refused = 'GRAPHS [2, true, "another rank cannot capture it"]'
    assert graphs == ([refused] if mode == "graphs" else [])


def test_tensor_parallel_without_torchrun_is_refused_by_name(model_path):
    from ops.benchmarks.measure.collecting_engine import CollectingEngine
    from tokenmill_worker.engines.own import EngineConfig, EngineConfigError

    with pytest.raises(EngineConfigError, match="torchrun"):
        CollectingEngine.load(
            EngineConfig(model=str(model_path), device="cpu", tensor_parallel=True)
        )
