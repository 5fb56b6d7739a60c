"""Loads the settings. This is the only reader of the environment.

Flags win over the environment, the environment over the defaults; there is no settings file. All
problems are reported together, misspelt variables included, so that one correction repairs a start.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from tokenmill.errors import ConfigurationError
from tokenmill.webhooks import sign
from tokenmill_schemas.keys import queue_of
from tokenmill_worker.contract.engine_kind import EngineConfigError
from tokenmill_worker.contract.name_table import read_arguments
from tokenmill_worker.contract.setting_fields import SPLIT_BY_VLLM
from tokenmill_worker.engines import kind_for, kind_named
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings.addresses import database_problem, endpoint_problem, redis_problem
from tokenmill_worker.settings.fields import (
    ENGINE_FIELDS,
    PREFIX,
    Settings,
    masked,
    variable_of,
)
from tokenmill_worker.settings.model_names import naming_problems

# Variables for ops/ scripts, the command line and the gateway; a worker ignores them.
_OTHERS_VARIABLES = frozenset({"TOKENMILL_BENCH_SETUP"})
_GATEWAY = f"{PREFIX}GATEWAY_"


def child_environment(settings: Settings) -> dict[str, str]:
    """Return our environment with these settings in place of ours, for a child that loads them
    again.
    """
    rest = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)
    }
    return rest | settings.variables()


def load_settings(
    overrides: Mapping[str, object] | None = None, *, strict: bool = True
) -> Settings:
    """Load the settings: flags over environment over defaults. Raises SettingsError; `strict`:
    unknown variables are problems.
    """
    given = {
        name: _flag_value(value) for name, value in (overrides or {}).items() if value is not None
    }
    problems = _unknown_variables(os.environ) if strict else []
    try:
        settings = Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        wrong = [
            _Wrong(str(entry["loc"][0]), entry["msg"], entry["input"], entry["type"])
            for entry in error.errors()
        ]
        problems += [item.sentence(given) for item in wrong]
        fields = Settings.model_fields
        repaired = {item.name: fields[item.name].default for item in wrong if item.name in fields}
        known = {name: value for name, value in given.items() if name in fields}
        settings = Settings(**{**known, **repaired})  # so the other settings can still be checked
    problems += _semantic_problems(settings, given)
    if problems:
        raise SettingsError(problems)
    return settings


_PLAINER = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def _flag_value(value: object) -> object:
    return None if isinstance(value, str) and value.lower() == "none" else value


@dataclasses.dataclass(frozen=True, slots=True)
class _Wrong:
    name: str
    message: str
    value: object
    kind: str

    def sentence(self, given: Mapping[str, object]) -> str:
        if self.kind == "extra_forbidden":
            return _unknown(self.name, self.name, Settings.model_fields)
        words = self.message.removeprefix("Input should be ").split(", unable")[0]
        for theirs, ours in _PLAINER.items():
            words = words.replace(theirs, ours)
        return f"{_spelling(self.name, given)} must be {words}, not {masked(self.value)!r}"


def _spelling(name: str, given: Mapping[str, object]) -> str:
    """Return a setting's name as the user wrote it: as a flag or as a variable."""
    return "--" + name.replace("_", "-") if name in given else variable_of(name)


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = {variable_of(name): None for name in Settings.model_fields}
    unknown = sorted(
        name
        for name in environ
        if name.upper().startswith(PREFIX)
        and not name.upper().startswith(_GATEWAY)
        and name.upper() not in {*known, *_OTHERS_VARIABLES}
    )
    return [_unknown(name, name.upper(), known) for name in unknown]


def _unknown(spelt: str, name: str, known: Mapping[str, Any]) -> str:
    """Return the sentence about a name that is no setting, with a near one of those `known`."""
    if name.lower().endswith("tensor_parallel"):
        return f"{spelt} {SPLIT_BY_VLLM}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"{spelt} is not a setting" + (f"; did you mean {near[0]}?" if near else "")


def _semantic_problems(settings: Settings, given: Mapping[str, object]) -> list[str]:
    def spelt(name: str) -> str:
        return _spelling(name, given)

    found = []
    for sentence in _engine_problems(settings):  # each begins with the setting's name
        name, _, rest = sentence.partition(" ")
        found.append(f"{spelt(name)} {rest}")
    for name, problem in (
        ("redis_url", redis_problem(settings.redis_url)),
        ("database_url", database_problem(settings.database_url)),
        ("otel_endpoint", endpoint_problem(settings.otel_endpoint)),
    ):
        if problem is not None:
            given_as = "" if problem.endswith("?") else f", not {masked(getattr(settings, name))!r}"
            found.append(f"{spelt(name)}: {problem}{given_as}")
    model, adapters = (getattr(settings, name) for name in ("model", "adapters"))
    names = {model, settings.queue or queue_of(model)}
    naming = naming_problems(names, adapters, settings.aliases, settings.chat_template)
    found += [f"{spelt(name)} {problem}" for name, problem in naming]
    found += [
        f"{spelt(name)} {problem}"
        for name, problem in (*_model_problems(settings), *_task_problems(settings))
    ]
    if re.search(r"[{}\s]", settings.queue):
        found.append(
            f"{spelt('queue')} must not contain braces or white space, not {settings.queue!r}"
        )
    return found


def _engine_problems(settings: Settings) -> Iterator[str]:
    """Yield the problems of the chosen engine's settings, and each setting of another kind."""
    kind, wanted = settings.engine_kind, kind_for(settings.model)
    if kind != wanted != "own":
        yield f"engine must not be {kind}: the model {settings.model} is of the engine {wanted}"
        return
    known: Collection[str] = ENGINE_FIELDS
    try:
        known = kind_named(kind).settings
        settings.engine_config()
    except EngineConfigError as error:
        yield from error.problems
    try:
        read_arguments(settings.engine_arg)
    except ValueError as error:
        yield f"engine_arg {error}"
    for name, kinds in ENGINE_FIELDS.items():
        if name not in known and name in settings.model_fields_set:
            owners = " and ".join(kinds)
            instead = kind_named(kind).instead.get(name)
            own = f"{kind}: say {instead}" if instead else kind
            yield f"{name} is a setting of the engine {owners}; this worker's engine is {own}"


def _model_problems(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield (setting, problem) for engine settings that contradict each other or have no effect."""
    tokens, seqs, longest, graphs, device = (
        getattr(settings, name)  # fields made from EngineConfig, which type checkers do not see
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "cuda_graphs",
            "device",
        )
    )
    if 0 < tokens < seqs:
        yield (
            "max_num_batched_tokens",
            f"({tokens}) must be at least max_num_seqs ({seqs}), or some never run at once",
        )
    default = settings.default_max_tokens
    if longest is not None and default is not None and default >= longest:
        yield "default_max_tokens", f"({default}) must be below max_model_len ({longest})"
    if graphs and device == "cpu":
        yield "cuda_graphs", "does nothing on device cpu"


def _task_problems(settings: Settings) -> Iterator[tuple[str, str]]:
    try:
        _ = settings.networks
    except ValueError as error:
        yield "webhook_networks", f"must be networks, separated by commas: {error}"
    try:
        if settings.webhook_secret:
            sign("", 0, b"", settings.webhook_secret)
    except ConfigurationError as error:
        yield "webhook_secret", f"is none: {error}"
    if settings.retain_usage_days and settings.retain_usage_days < 7:
        yield (
            "retain_usage_days",
            f"must be at least 7, or 0 for ever, not {settings.retain_usage_days:g}",
        )
