"""Tests of the flags that a command gets, as a shell writes them."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from tokenmill_worker.settings.flags import with_settings


def given_by(*words: str) -> dict[str, object]:
    """Return the settings that a command gets."""
    found: dict[str, object] = {}

    def show(flags: dict[str, object]) -> None:
        """Keep the flags."""
        found.update(flags)

    app = typer.Typer()
    app.command()(with_settings(show))
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return found


def test_a_flag_without_text_is_passed_on_and_not_dropped() -> None:
    """`--database-url "$UNSET"` would otherwise write results into the default file."""
    assert given_by("--database-url", "", "--max-num-seqs", "") == {
        "database_url": "",
        "max_num_seqs": "",
    }


def test_an_engine_argument_may_be_given_several_times() -> None:
    words = ("--engine-arg", "a=1", "--engine-arg", 'b={"c": 2}')
    assert given_by(*words) == {"engine_arg": "a=1 'b={\"c\": 2}'"}
    assert given_by() == {}


def test_an_engine_argument_may_be_written_as_vllm_writes_it() -> None:
    words = ("--engine-arg", "--tensor-parallel-size=8", "--engine-arg=--seed=1")
    assert given_by(*words) == {"engine_arg": "--tensor-parallel-size=8 --seed=1"}
