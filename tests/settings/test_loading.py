"""Settings: flags override the environment, which overrides defaults; all problems come at once."""

import dataclasses

import pytest
from typer.testing import CliRunner

from tokenmill.cli import app
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.types import SchedulingPolicy
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings import Settings, child_environment, load_settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):  # noqa: TID251 - what this run was started with
        if name.startswith("TOKENMILL_"):
            monkeypatch.delenv(name)


def _problems(**flags: object) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags)
    return caught.value.problems


def test_the_default_settings_are_valid() -> None:
    settings = load_settings()
    assert settings.queue_name == "smollm2-135m-instruct"
    # A service schedules by class and tenant; an engine used alone has neither.
    assert settings.engine_config() == EngineConfig(
        model="smollm2-135m-instruct", policy=SchedulingPolicy.PRIORITY
    )


def test_settings_that_contradict_each_other_are_reported_with_the_others() -> None:
    problems = _problems(
        cache_disk_gib="0", max_num_batched_tokens="10", max_num_seqs="64",
        cpu_offload_gib="4000",
        max_model_len="100",
        default_max_tokens="200", max_memory_gib="-3", stall_seconds="0.2",
    )  # fmt: skip
    named = sorted(line.split(" ")[0] for line in problems)
    assert named == [
        "--cache-disk-gib", "--cpu-offload-gib", "--default-max-tokens", "--max-memory-gib",
        "--max-num-batched-tokens", "--stall-seconds",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "long_prefill_token_threshold",
            {"long_prefill_token_threshold": 101, "max_model_len": 100},
        ),
        ("bulk_slowdown", {"enable_chunked_prefill": False, "bulk_slowdown": 0.25}),
        (
            "enable_chunked_prefill",
            {"enable_chunked_prefill": False, "policy": "fifo", "max_num_partial_prefills": 2},
        ),
        (
            "max_num_batched_tokens",
            {
                "enable_chunked_prefill": False,
                "policy": "fifo",
                "max_model_len": 600,
                "max_num_batched_tokens": 512,
            },
        ),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 63, "max_num_seqs": 64}),
        ("max_memory_gib", {"max_memory_gib": 0.0}),
        ("cpu_offload_gib", {"cpu_offload_gib": 4000.0}),
        ("cache_disk", {"cache_disk": "/tmp/blocks", "prefix_cache": False}),
        ("cache_disk_gib", {"cache_disk_gib": -1.0}),
        ("cuda_graphs", {"cuda_graphs": True, "device": "cpu"}),
        ("stall_seconds", {"stall_seconds": 0.5}),
    ],
)
def test_a_setting_that_is_impossible_or_without_effect_is_refused(
    name: str, changes: dict[str, object]
) -> None:
    (problem,) = _problems(**changes)
    assert problem.startswith("--" + name.replace("_", "-"))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 63},  # the default of max_num_seqs follows
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
        {"enable_chunked_prefill": False, "bulk_slowdown": "none", "max_model_len": 512},
        {"cpu_offload_gib": 0.5},
    ],
)
def test_settings_just_within_the_refused_combinations_are_accepted(
    changes: dict[str, object],
) -> None:
    assert load_settings(changes, strict=False)


@pytest.mark.parametrize(
    ("name", "url"),
    [("redis_url", "redis://localhost:1x/0"), ("database_url", "postgresql://localhost:1x/t")],
)
def test_a_url_with_a_malformed_port_asks_whether_the_password_is_quoted(
    name: str, url: str
) -> None:
    (problem,) = _problems(**{name: url})
    assert problem.endswith("?")


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_QUEUE", "from-environment")
    monkeypatch.setenv("TOKENMILL_MAX_NUM_SEQS", "8")
    settings = load_settings({"queue": "from-flag", "model": None})
    assert settings.queue_name == "from-flag"
    assert settings.engine_config().max_num_seqs == 8


def test_every_problem_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "LEASE_SECONDS": "soon",
        "LEASE_SECOND": "3",
        "SPECULATIVE_TOKENS": "-1",
        "PREFIX_CACHE": "perhaps",
        "POLICY": "lifo",
        "MAX_MODEL_LEN": "0",
        "REDIS_URL": "http://user:hunter2@x",
        "DATABASE_URL": "mysql://user:hunter2@x/y",
        "QUEUE": "a {b}",
        "RECORD_GROUP": "256",
        "DRAIN_SECONDS": "nan",
    }
    for name, value in wrong.items():
        monkeypatch.setenv(f"TOKENMILL_{name}", value)
    problems = _problems(metrics_port="123456")
    assert len(problems) == 12
    for name in wrong:
        assert (
            sum(line.startswith((f"TOKENMILL_{name} ", f"TOKENMILL_{name}:")) for line in problems)
            == 1
        ), name
    assert sum(line.startswith("--metrics-port ") for line in problems) == 1
    assert "did you mean TOKENMILL_LEASE_SECONDS?" in "".join(problems)
    assert "hunter2" not in "".join(problems)
    assert not [line for line in problems if "\n" in line]


@pytest.mark.parametrize("flag", ["--verify-model", "--no-verify-model"])
@pytest.mark.parametrize("value", ["false", "True", "0"])
def test_a_value_after_a_flag_without_one_is_refused_with_the_flag_that_switches_it_off(
    flag: str, value: str
) -> None:
    done = CliRunner().invoke(app, ["worker", flag, value], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    wanted = "--verify-model takes no value: --verify-model switches it on, --no-verify-model off"
    assert wanted in done.stderr


@pytest.mark.parametrize(
    "name", [n for n in Settings.model_fields if n.endswith(("_seconds", "_days"))]
)
def test_times_beyond_the_range_of_clocks_and_databases_are_refused(name: str) -> None:
    problems = _problems(**{name: "1e16"})
    flag = f"--{name.replace('_', '-')}"
    assert any(line.startswith(flag) and "at most" in line for line in problems), problems


def test_an_unknown_variable_without_a_similar_setting_gets_no_suggestion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENMILL_ZZZZ", "1")
    assert _problems() == ("TOKENMILL_ZZZZ is not a setting",)


NAMES_VLLM = (
    "vLLM splits a model over devices, by --engine vllm --engine-arg tensor-parallel-size=N"
)


@pytest.mark.parametrize(
    "words",
    [
        ["--tensor-parallel"],
        ["--tensor-parallel", "2"],
        ["--engine", "vllm", "--tensor-parallel=2"],
    ],
)
def test_a_demand_for_tensor_parallelism_is_answered_with_vllm_s_argument(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["worker", *words], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert f"--tensor-parallel is not a setting: {NAMES_VLLM}" in done.stderr


def test_a_variable_or_field_of_tensor_parallelism_is_answered_with_vllm_s_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENMILL_TENSOR_PARALLEL", "2")
    done = CliRunner().invoke(app, ["worker"], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert f"TOKENMILL_TENSOR_PARALLEL is not a setting: {NAMES_VLLM}" in done.stderr
    with pytest.raises(EngineConfigError, match=f"tensor_parallel is not a setting: {NAMES_VLLM}"):
        EngineConfig(model="m", tensor_parallel=2)


def test_empty_and_none_leave_a_setting_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_LEASE_SECONDS", "")
    monkeypatch.setenv("TOKENMILL_MAX_MODEL_LEN", "none")
    settings = load_settings({"metrics_port": "none"})
    config = settings.engine_config()
    assert (settings.lease_seconds, config.max_model_len, settings.metrics_port) == (
        10.0,
        None,
        None,
    )


def test_an_unset_text_stays_unset_in_a_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = load_settings({"key_prefix": "", "metrics_host": "none"})
    assert (empty.key_prefix, empty.metrics_host, load_settings({"queue": "none"}).queue) == (
        "",
        "",
        "",
    )
    for name, value in empty.variables().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == empty


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(EngineConfig)])
def test_a_field_of_the_engine_is_a_setting_where_it_has_a_help_text(name: str) -> None:
    words = EngineConfig.__dataclass_fields__[name].metadata.get("help")
    field = Settings.model_fields.get(name)
    assert words == (None if field is None else field.description)
    assert words != ""


def test_a_child_process_loads_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_LOG_LEVEL", "debug")
    before = load_settings(
        {"policy": "priority", "prefix_cache": "false", "max_model_len": "64", "queue": "q"}
    )
    variables = {k: v for k, v in child_environment(before).items() if k.startswith("TOKENMILL_")}
    monkeypatch.delenv("TOKENMILL_LOG_LEVEL")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load_settings() == before


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "rediss://u:p@h:1/2",
        "unix:///run/r.sock",
        "redis+sentinel://a:1,b:2/main/0",
        "redis+cluster://a:1,b:2",
    ],
)
def test_every_kind_of_redis_address_is_accepted(url: str) -> None:
    assert load_settings({"redis_url": url}).redis_url == url


def test_passwords_are_not_shown() -> None:
    settings = load_settings(
        {"database_url": "postgresql://u:hunter2@h/db", "redis_url": "redis://:hunter2@h/0"}
    )
    assert "hunter2" not in str(settings.public())


@pytest.mark.parametrize("command", ["worker", "tasks", "dev"])
def test_the_help_names_every_flag_in_full_on_the_narrowest_screen(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    for name, field in Settings.model_fields.items():
        flag = name.replace("_", "-")
        assert (
            f" --{'[no-]' if field.annotation in (bool, bool | None) else ''}{flag} " in done.stdout
        ), flag
    assert "--no-" not in done.stdout
    assert " cpu, cuda, cuda:1, … or auto" in done.stdout  # values are written as they are said
    assert " Float32" not in done.stdout
