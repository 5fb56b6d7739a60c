"""Tests of our plugin in a process of vLLM's, with a manager of grammars in place of vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tokenmill_worker.engines.vllm import plugin
from tokenmill_worker.engines.vllm.plugin import EXTRA, BoundAnswer

CONFIG = SimpleNamespace(model_config="the model's")


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], Any]:
    """Install the plugin; return the class of vLLM's manager."""

    class Manager:
        def __init__(self, config: Any) -> None:
            self.vllm_config = config

        def _create_grammar(self, request: Any) -> str:
            return f"vLLM's of {request.request_id}"

    class OurGrammars:
        def __init__(self, config: Any) -> None:
            self.config = config

        def matched(
            self, request: Any, form: object, thoughts: object, num_resumed: int, tenant: str
        ) -> str:
            if num_resumed:
                raise ValueError("the answer so far does not follow its grammar")
            return f"ours of {request.request_id}"

    modules = {
        "vllm": SimpleNamespace(),
        "vllm.v1": SimpleNamespace(),
        "vllm.v1.structured_output": SimpleNamespace(StructuredOutputManager=Manager),
        "tokenmill_worker.engines.vllm.grammars": SimpleNamespace(CoreGrammars=OurGrammars),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(plugin.VARIABLE, str(tmp_path))
    plugin.install()
    begin = Manager.__init__
    plugin.install()  # vLLM calls it again
    assert Manager.__init__ is begin
    return Manager


def asked(**fields: Any) -> Any:
    answer = msgspec.json.encode(BoundAnswer(key="r#0.0", **fields)).decode()
    params = SimpleNamespace(extra_args={EXTRA: answer})
    return SimpleNamespace(request_id="r", sampling_params=params)


def test_a_core_has_our_grammars_from_its_start(manager: Callable[[Any], Any]) -> None:
    """The first answer that needs one would wait for the model's vocabulary otherwise."""
    begun = manager(CONFIG)
    assert begun.vllm_config is CONFIG
    assert begun.of_tokenmill.config == "the model's"


def test_a_bound_request_has_a_grammar_of_ours(manager: Callable[[Any], Any]) -> None:
    assert manager(CONFIG)._create_grammar(asked()) == "ours of r"


def test_the_reason_of_a_refused_grammar_is_left_for_the_engine_s_process(
    manager: Callable[[Any], Any],
) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        manager(CONFIG)._create_grammar(asked(num_resumed=1))
    assert plugin.taken_note("r#0.0") == "the answer so far does not follow its grammar"
    assert plugin.taken_note("r#0.0") == ""
