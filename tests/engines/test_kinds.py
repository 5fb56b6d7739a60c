"""Each kind of engine gives the outside its settings, its abilities and `serve`."""

import dataclasses
import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tokenmill_worker.engines import KINDS, kind_for, kind_named, missing_packages, serve_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_has_settings_that_its_class_takes_and_a_help_text_for_each(name):
    kind = kind_named(name)
    fields = {field.name: field for field in dataclasses.fields(kind.config)}
    assert kind.config.kind == name
    assert "model" in kind.settings
    assert all(fields[setting].metadata["help"] for setting in kind.settings)
    assert len(set(kind.settings)) == len(kind.settings)


@pytest.mark.parametrize("name", [*KINDS, "ops.examples.engine"])
def test_a_kind_is_served_by_a_function_of_start_mailbox_and_emit(name):
    assert list(inspect.signature(serve_of(name)).parameters) == ["start", "mailbox", "emit"]


def test_the_packages_of_our_engine_are_those_of_its_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [re.match(r"[\w-]+", line)[0] for line in project["optional-dependencies"]["engine"]]
    assert list(kind_named("own").packages) == [name.replace("-", "_") for name in named]


def test_packages_that_are_missing_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr("tokenmill_worker.engines.find_spec", lambda name: name == "torch" or None)
    other = "or name another environment's Python with --engine-python"
    python = sys.executable
    assert missing_packages("vllm") == (
        "the engine vllm needs vllm, jsonschema_rs: "
        f"{python} -m pip install 'vllm>=0.32,<0.33' jsonschema-rs, {other}"
    )
    words = missing_packages("own")
    assert words.startswith("the engine own needs transformers, safetensors, ")
    assert words.endswith(f": {python} -m pip install '.[engine]' in tokenmill's folder, {other}")


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("synthetic", "synthetic"), ("synthetic?step_ms=5", "synthetic"),
        ("synthetic-7b", "own"), ("smollm2-135m-instruct", "own"), ("/models/synthetic", "own"),
    ],
)  # fmt: skip
def test_the_name_of_a_model_chooses_the_kind_of_engine(model, kind):
    assert kind_for(model) == kind
