"""Each kind of engine gives the outside its settings, its abilities and `serve`."""

import dataclasses
import inspect

import pytest

from tokenmill_worker.engines import KINDS, kind_for, kind_named, serve_of


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_has_settings_that_its_class_takes_and_a_help_text_for_each(name):
    kind = kind_named(name)
    fields = {field.name: field for field in dataclasses.fields(kind.config)}
    assert kind.config.kind == name
    assert "model" in kind.settings
    assert all(fields[setting].metadata["help"] for setting in kind.settings)
    assert len(set(kind.settings)) == len(kind.settings)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_served_by_a_function_of_start_mailbox_and_emit(name):
    assert list(inspect.signature(serve_of(name)).parameters) == ["start", "mailbox", "emit"]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("synthetic", "synthetic"), ("synthetic?step_ms=5", "synthetic"),
        ("synthetic-7b", "own"), ("smollm2-135m-instruct", "own"), ("/models/synthetic", "own"),
    ],
)  # fmt: skip
def test_the_name_of_a_model_chooses_the_kind_of_engine(model, kind):
    assert kind_for(model) == kind
