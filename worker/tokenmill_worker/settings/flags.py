"""Builds a command whose options are the fields of Settings: every setting is a flag.

Values stay text here. `load_settings` reads them all, so that flags and variables follow one rule
and every problem is reported at once.
"""

from __future__ import annotations

import copy
import inspect
import shlex
import types
import typing
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from tokenmill_worker.contract.setting_fields import SPLIT_BY_VLLM
from tokenmill_worker.engines import KINDS
from tokenmill_worker.settings.fields import ENGINE_FIELDS, PREFIX, Settings

_TASKS = ("tasks_", "webhook_", "retain_")
REPEATED = "engine_arg"  # may be given several times
_TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")
Command = Callable[[dict[str, object]], None]


class SettingsCommand(TyperCommand):
    """A command whose help writes `--[no-]prefix-cache`: a column of no-flags would leave no room
    for the other names in 80 columns. `--prefix-cache false` is refused with the flag to use,
    `--tensor-parallel` with the one that splits a model.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag, value in pairwise(["", *args]):
            name = value.partition("=")[0]
            if name in ("--tensor-parallel", "--tensor-parallel-size") and flag != "--engine-arg":
                ctx.fail(f"{name} {SPLIT_BY_VLLM}")
            for parameter in self.params:
                names = [*parameter.opts, *parameter.secondary_opts]
                if parameter.secondary_opts and flag in names and value.lower() in _TRUTHS:
                    on, off = names
                    ctx.fail(f"{on} takes no value: {on} switches it on, {off} off")
        return TyperCommand.parse_args(self, ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown: Any = copy.copy(self)
        shown.params = [_with_its_no(parameter) for parameter in self.params]
        TyperCommand.format_help(shown, ctx, formatter)


def _with_its_no(parameter: Any) -> Any:
    if not parameter.secondary_opts:
        return parameter
    shown = copy.copy(parameter)
    shown.opts, shown.secondary_opts = [f"--[no-]{parameter.opts[0].removeprefix('--')}"], []
    return shown


def with_settings(
    command: Command, others: Mapping[str, str] = MappingProxyType({})
) -> Callable[..., None]:
    """Return a command with a flag for each setting. `command` gets the flags that were given, by
    the names of their settings. `others`: names and help texts of further flags that are no
    settings.
    """

    def run(**flags: object) -> None:
        given = {name: _joined(value) for name, value in flags.items() if value is not None}
        if not given.get(REPEATED):
            given.pop(REPEATED, None)
        command(given)

    fields = {
        name: field for name, field in Settings.model_fields.items() if name not in ENGINE_FIELDS
    }
    fields |= {name: Settings.model_fields[name] for name in ENGINE_FIELDS}
    described: Any = run
    described.__name__ = command.__name__
    described.__doc__ = command.__doc__
    described.__annotations__ = {name: _own(name, words) for name, words in others.items()}
    described.__annotations__ |= {name: _annotation(name, field) for name, field in fields.items()}
    described.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
            for name, annotation in described.__annotations__.items()
        ]
    )
    return run


def _joined(value: object) -> object:
    """Return the values of a flag that is given several times as one text."""
    return shlex.join(value) if isinstance(value, list) else value


def _own(name: str, words: str) -> Any:
    return Annotated[str | None, typer.Option(f"--{name}", metavar="TEXT", help=words)]


def _annotation(name: str, field: FieldInfo) -> Any:
    flag = name.replace("_", "-")
    words = field.description or ""
    text = _capitalised(words) + _default(field, words)
    common: dict[str, Any] = {"help": text, "rich_help_panel": panel_of(name)}
    if name == REPEATED:
        option = typer.Option(f"--{flag}", metavar="NAME=VALUE", **common)
        return Annotated[list[str] | None, option]
    if bool in _kinds(field):
        return Annotated[bool | None, typer.Option(f"--{flag}/--no-{flag}", **common)]
    return Annotated[str | None, typer.Option(f"--{flag}", metavar=_metavar(field), **common)]


def _capitalised(words: str) -> str:
    """Capitalise a help text, unless it begins with a list of values."""
    first = words.split(" ")[0]
    return (
        words
        if first.endswith(",") or words.startswith(f"{first} or ")
        else words[:1].upper() + words[1:]
    )


def panel_of(name: str) -> str:
    """Return the part of the service that a setting belongs to. The help and the settings page
    group settings by it.
    """
    if name not in ENGINE_FIELDS:
        return "Tasks" if name.startswith(_TASKS) else "Worker"
    kinds = ENGINE_FIELDS[name]
    return "Engine" if kinds == KINDS else f"Engine: {' and '.join(kinds)}"


def _default(field: FieldInfo, words: str) -> str:
    if field.default in (None, "") or "(default" in words:
        return ""
    value = str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"
    return f" (default: {value})"


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    kind = field.annotation
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _metavar(field: FieldInfo) -> str:
    kinds = _kinds(field)
    return "INT" if int in kinds else "NUMBER" if float in kinds else "TEXT"


def variables_epilog() -> str:
    return f"Each flag is also a variable: --max-num-seqs is {PREFIX}MAX_NUM_SEQS. Flags win."
