"""Tests of the table of what an engine does with each parameter of a job."""

import dataclasses
import re

import msgspec
import pytest

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engines import KINDS, kind_named
from tokenmill_worker.local.doctor import show_parameters
from tokenmill_worker.local.parameter_table import ParameterRow, parameter_rows
from tokenmill_worker.settings import ENGINE_FIELDS

# fields of a request to an engine, by the job's parameter; the others are the worker's own
SET_BY_A_JOB = {
    "prompt": "prompt", "priority": "priority", "tenant": "tenant", "cache_salt": "tenant",
    "deadline": "deadline_ms", "thoughts": "thinking_budget", "given": "continuations",
}  # fmt: skip
OF_THE_WORKER = {"request_id", "params", "resumed", "done"}


def row_of(kind: str, name: str) -> ParameterRow:
    (found,) = [row for row in parameter_rows(kind_named(kind)) if row.name == name]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_that_a_job_can_set_has_one_row(kind: str) -> None:
    names = [row.name for row in parameter_rows(kind_named(kind))]
    assert len(set(names)) == len(names)
    assert set(GenerationRequest.__struct_fields__) == SET_BY_A_JOB.keys() | OF_THE_WORKER
    assert {*SamplingParams.__struct_fields__, *SET_BY_A_JOB.values(), "tools"} == set(names)
    assert all(row.ours and row.theirs for row in parameter_rows(kind_named(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_note_of_a_kind_belongs_to_a_row_and_each_replacement_to_a_setting(kind: str) -> None:
    found = kind_named(kind)
    assert found.notes.keys() <= {row.name for row in parameter_rows(found)}
    for name in found.instead:
        assert kind not in ENGINE_FIELDS[name]


def test_our_engine_takes_what_the_queue_takes() -> None:
    assert not [row for row in parameter_rows(kind_named("own")) if row.is_different]


def test_a_row_has_the_bounds_that_are_checked_and_what_the_engine_lacks() -> None:
    assert row_of("vllm", "temperature")[1:3] == ("from 0 to 100", "from 0 to 2")
    assert row_of("vllm", "bad_words_ids")[2:] == ("–", "refused by name")
    assert row_of("synthetic", "response_format")[2:] == ("–", "refused by name")
    assert row_of("vllm", "top_p")[1:] == ("from 0 to 1", "the same", "")


def test_a_form_that_an_engine_lacks_is_named_beside_those_that_it_has():
    kind = kind_named("vllm")
    lacking = msgspec.structs.replace(kind.capabilities, structured=("json_schema", "regex"))
    rows = parameter_rows(dataclasses.replace(kind, capabilities=lacking))
    (row,) = [row for row in rows if row.name == "response_format"]
    assert (row.theirs, row.happens) == ("the same", "refused by name: grammar, structural_tag")


def test_the_table_is_aligned_and_whole_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_parameters("vllm")
    head, *lines = capsys.readouterr().out.strip("\n").splitlines()
    assert head.split("  ")[0] == "parameter"
    assert len(lines) == len(parameter_rows(kind_named("vllm")))
    start = head.index("vllm")
    assert {line[start:].split("  ")[0] for line in lines} == {"the same", "from 0 to 2", "–"}


def test_a_terminal_wraps_the_notes_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("TTY_COMPATIBLE", "1"), ("TTY_INTERACTIVE", "0"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    show_parameters("vllm")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
