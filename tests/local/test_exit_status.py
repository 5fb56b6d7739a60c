"""Tests of the exit status of a command that ends with an error a person can repair."""

import pytest
import typer

from tokenmill_worker.cli import _sentences
from tokenmill_worker.contract.host import EngineDied
from tokenmill_worker.errors import SettingsError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SettingsError(["--model must not be empty"]), 2),
        (EngineDied("/no/python cannot be run: No such file", at_start=True), 2),
        (EngineDied("the engine process ended by SIGKILL", at_start=True, may_pass=True), 1),
        (EngineDied("the engine process ended"), 1),
    ],
)
def test_an_error_that_settings_repair_ends_with_status_2_and_another_with_1(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, _sentences():
        raise error
    assert ended.value.exit_code == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert str(error) in printed.err
