"""A worker has settings of its own and those of its kind of engine; others are refused by name."""

import dataclasses

import pytest

from tokenmill_worker.contract.name_table import read_arguments
from tokenmill_worker.engines import KINDS, kind_named
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings import ENGINE_FIELDS, Settings, load_settings
from tokenmill_worker.settings.flags import panel_of


def problems_of(**given):
    with pytest.raises(SettingsError) as raised:
        load_settings(given, strict=False)
    return list(raised.value.problems)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, "own"),
        ({"model": "synthetic?step_ms=5"}, "synthetic"),
        ({"model": "organisation/model", "engine": "own"}, "own"),
        ({"model": "synthetic", "engine": "synthetic"}, "synthetic"),
    ],
)
def test_the_engine_is_the_named_one_or_follows_from_the_model(given, kind):
    config = load_settings(given, strict=False).engine_config()
    assert (config.kind, type(config)) == (kind, kind_named(kind).config)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sglang", ""),
        ("no.such.engine", ": No module named 'no'"),
        ("tokenmill_worker.engines.process", ": No module named 'tokenmill_worker.engines.process"
         ".config'"),
        ("tokenmill_worker.engines.own.lora", ": No module named 'tokenmill_worker.engines.own.lora"
         ".config'"),
        ("tests.settings", ": No module named 'tests.settings.config'"),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_exist_is_refused_with_those_that_do(name, why):
    words = "--engine must be own, synthetic, vllm or a package as my_package.my_engine, not"
    assert problems_of(engine=name) == [f"{words} {name!r}{why}"]


def test_an_engine_of_another_package_has_the_settings_that_it_names(monkeypatch):
    given = {"engine": "ops.examples.engine", "model": "/models/m", "max_num_seqs": 9}
    config = load_settings(given, strict=False).engine_config()
    assert (config.kind, config.model, config.max_num_seqs) == (given["engine"], "/models/m", 9)
    assert problems_of(**given, quantization="int8") == [
        "--quantization is a setting of the engine own; this worker's engine is ops.examples.engine"
    ]


def test_a_value_that_equals_our_default_reaches_an_engine_of_another_package(monkeypatch):
    """The engine's own default may be another one."""
    default = Settings.model_fields["max_num_seqs"].default
    given = {"engine": "ops.examples.engine", "model": "/models/m", "max_num_seqs": default}
    for name, value in load_settings(given).variables().items():
        monkeypatch.setenv(name, value)
    config = load_settings().engine_config()
    assert config.max_num_seqs == default
    assert type(config).max_num_seqs != default


def test_an_engine_that_names_a_setting_of_no_worker_is_refused(monkeypatch):
    kind = dataclasses.replace(kind_named("ops.examples.engine"), settings=("model", "speed"))
    monkeypatch.setattr("ops.examples.engine.config.KIND", kind)
    assert problems_of(engine="ops.examples.engine") == [
        "--engine ops.examples.engine names settings that no worker has: speed"
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("tensor-parallel-size", "must be NAME=VALUE, separated by spaces"),
        ("=8", "must be NAME=VALUE"),
        ("a=1 a=2", "names a twice"),
        ("a='1", "No closing quotation"),
    ],
)
def test_engine_arguments_that_cannot_be_read_are_refused(given, words):
    (problem,) = problems_of(engine="vllm", model="/m", engine_arg=given)
    assert problem.startswith(f"--engine-arg {words}")


def test_engine_arguments_are_named_values_with_spaces_between():
    given = 'tensor-parallel-size=8 \'speculative-config={"method": "ngram"}\''
    settings = load_settings({"engine": "vllm", "model": "/m", "engine_arg": given})
    assert read_arguments(settings.engine_arg) == {
        "tensor-parallel-size": "8",
        "speculative-config": '{"method": "ngram"}',
    }


def test_an_engine_that_contradicts_the_model_is_refused_with_one_sentence():
    assert problems_of(engine="own", model="synthetic?step_ms=5") == [
        "--engine must not be own: the model synthetic?step_ms=5 is of the engine synthetic"
    ]
    assert problems_of(engine="synthetic", model="/models/llama") == [
        "--model must be synthetic or synthetic?OPTION=VALUE, not '/models/llama'"
    ]


def test_an_option_that_the_synthetic_model_does_not_have_is_refused_before_the_start():
    assert problems_of(model="synthetic?speed=9") == [
        "--model option speed=9: known are step_ms, token_us, length, mean_tokens, numbers"
    ]


def test_settings_of_another_engine_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("TOKENMILL_DEVICE", "cpu")
    assert problems_of(model="synthetic", quantization="int8") == [
        "TOKENMILL_DEVICE is a setting of the engine own; this worker's engine is synthetic",
        "--quantization is a setting of the engine own; this worker's engine is synthetic",
    ]


def test_settings_of_another_engine_that_are_not_given_do_not_matter(monkeypatch):
    monkeypatch.setenv("TOKENMILL_QUANTIZATION", "")
    settings = load_settings({"model": "synthetic", "max_num_seqs": 9}, strict=False)
    config = settings.engine_config()
    assert (config.max_num_seqs, config.quantization, config.policy) == (9, None, "priority")


@pytest.mark.parametrize("name", sorted(ENGINE_FIELDS))
def test_a_setting_of_an_engine_has_its_kinds_in_the_title_of_its_group(name):
    kinds = [kind for kind in KINDS if name in kind_named(kind).settings]
    assert panel_of(name) == (
        "Engine" if kinds == list(KINDS) else "Engine: " + " and ".join(kinds)
    )


def test_no_setting_of_the_worker_is_one_of_an_engine():
    assert {name for name in Settings.model_fields if panel_of(name) in ("Worker", "Tasks")} == (
        set(Settings.model_fields) - set(ENGINE_FIELDS)
    )
