"""The model-free runner: its tokenizer's files, and nothing left when its process is killed."""

import os
import signal
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.synthetic.runner import END_OF_TEXT, TOKENIZER, SyntheticRunner
from tokenmill_worker.text.tokenizer import Tokenizer

DIES = """
import os, signal
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner

runner = SyntheticRunner.load(EngineConfig(model="synthetic"))
assert (runner.info.model_path / "tokenizer.json").exists()
os.kill(os.getpid(), signal.SIGKILL)
"""


LOADS = """
import sys
from tokenmill_worker.engines.synthetic.runner import TOKENIZER
from tokenmill_worker.text.tokenizer import Tokenizer

print(Tokenizer.load(TOKENIZER).encode("Grüße", special=True), "torch" in sys.modules)
"""


def test_the_synthetic_tokenizer_is_transformers_choice_and_loads_without_torch():
    said = subprocess.run(
        [sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    chosen = AutoTokenizer.from_pretrained(str(TOKENIZER), local_files_only=True)
    assert type(chosen) is type(Tokenizer.load(TOKENIZER)._tokenizer)
    assert said.strip() == f"{tuple(chosen.encode('Grüße'))} False"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TOKENIZER)


def test_a_synthetic_token_is_a_byte(tokenizer):
    text = "Grüße, 世界!\n"
    assert tokenizer.encode(text, special=True) == tuple(text.encode())
    assert tokenizer.eos_token_ids == {END_OF_TEXT}


def test_synthetic_runners_share_the_package_s_tokenizer_files():
    runner = SyntheticRunner.load(EngineConfig(model="synthetic"))
    runner.close()
    assert runner.info.model_path == TOKENIZER
    assert sorted(path.name for path in TOKENIZER.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_killed_synthetic_engine_leaves_no_files(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # noqa: TID251 - handed on
    done = subprocess.run([sys.executable, "-c", DIES], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
