"""The class of a tokenizer: the one that AutoTokenizer would choose, and without torch where that
is known.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tokenmill_worker.engines.own.model.model_files import resolve
from tokenmill_worker.engines.synthetic.runner import TOKENIZER
from tokenmill_worker.text.tokenizer import AS_NAMED, Tokenizer

LOADS = """
import sys
from pathlib import Path
from tokenmill_worker.text.tokenizer import Tokenizer, import_library
from threading import Thread

Thread(target=import_library).start()  # as in a worker whose engine was loaded quickly
print(type(Tokenizer.load(Path(sys.argv[1]))._tokenizer).__name__, "torch" in sys.modules)
"""

OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    def encode(self, text, **options):
        return super().encode(" ".join(reversed(text.split(" "))), **options)
"""


@pytest.fixture
def folder(tmp_path):
    def make(model_type: str, named: str, **settings: object) -> str:
        made = tmp_path / f"{model_type}-{named}"
        made.mkdir()
        shutil.copy(TOKENIZER / "tokenizer.json", made)
        (made / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": named} | settings), "utf-8"
        )
        if model_type:
            (made / "config.json").write_text(json.dumps({"model_type": model_type}), "utf-8")
        return str(made)

    return make


@pytest.mark.parametrize("suffix", ["", "Fast"])
@pytest.mark.parametrize(
    ("model_type", "named"),
    [(kind, named) for kind, names in AS_NAMED.items() for named in sorted(names)],
)
def test_the_class_chosen_by_name_equals_transformers(folder, model_type, named, suffix):
    where = folder(model_type, named + suffix)
    chosen = AutoTokenizer.from_pretrained(where, local_files_only=True)
    ours = Tokenizer.load(where)._tokenizer
    assert type(ours) is type(chosen)
    assert ours.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    assert (ours.eos_token_id, ours.bos_token_id) == (chosen.eos_token_id, chosen.bos_token_id)


@pytest.mark.parametrize("named", ["TokenizersBackend", "LlamaTokenizer", "Unheard"])
def test_transformers_own_rules_override_the_named_class(folder, named):
    where = folder("qwen2", named)  # whatever Qwen2's folders name, they get Qwen2's class
    assert type(Tokenizer.load(where)._tokenizer).__name__ == "Qwen2Tokenizer"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "gemma3-270m"])
def test_a_real_model_s_tokenizer_loads_without_torch(model):
    where = str(resolve(model))
    said = subprocess.run(
        [sys.executable, "-c", LOADS, where],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    chosen = AutoTokenizer.from_pretrained(where, local_files_only=True)
    assert said.stdout.split() == [type(chosen).__name__, "False"]


def test_a_tokenizer_with_its_own_code_is_loaded_only_if_trusted(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    where = folder(
        "", "OwnTokenizer", auto_map={"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}
    )
    (Path(where) / "own_tokenizer.py").write_text(OWN_TOKENIZER, "utf-8")
    plain = Tokenizer.load(TOKENIZER)
    own = Tokenizer.load(where, trust_remote_code=True)
    assert own.encode("one two") == plain.encode("two one")
    with pytest.raises(ValueError, match="trust_remote_code"):
        Tokenizer.load(where)
