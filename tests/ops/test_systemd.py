"""The units of ops/deploy/systemd: options exist, and a stop has the time of a drain."""

import configparser
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenmill_gateway.commands import app as gateway_app
from tokenmill_worker.app import RECORD_DRAIN_S
from tokenmill_worker.cli import app
from tokenmill_worker.settings import Settings

UNITS = sorted((Path(__file__).parents[2] / "ops/deploy/systemd").glob("*.service"))


def service_of(path: Path) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, delimiters="=", comment_prefixes="#")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    assert set(unit) == {"DEFAULT", "Unit", "Service", "Install"}
    return unit["Service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_the_stop_timeout_covers_a_drain(path: Path) -> None:
    service = service_of(path)
    fields = Settings.model_fields
    drain = fields["drain_seconds"].default + RECORD_DRAIN_S
    assert float(service["TimeoutStopSec"]) > drain + 20  # Redis may not answer meanwhile
    assert service["KillMode"] == "mixed"  # the engine's process is ended by the worker, not beside
    assert service["Restart"] == "always"
    assert service["User"] == "tokenmill"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_the_commands_and_options_of_the_units_exist(path: Path) -> None:
    _, command, *options = service_of(path)["ExecStart"].split()
    group = gateway_app if command == "gateway" else app
    shown = CliRunner().invoke(group, [command, "--help"], env={"COLUMNS": "200"}).output
    for option in re.findall(r"--\S+", " ".join(options)):
        assert option in shown
