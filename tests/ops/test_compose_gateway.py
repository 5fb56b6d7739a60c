"""The gateway of docker-compose.yml: its settings, its users, its files and its drain."""

import re
from typing import Any
from urllib.parse import urlsplit

import typer

from tests.ops.test_compose import DOCKERFILE, ROOT
from tests.ops.test_compose import _plain as plain
from tests.ops.test_compose import compose as compose
from tokenmill_gateway.commands import app


def gateway_variables() -> set[str]:
    """Return the variables of the options of `tokenmill gateway`."""
    commands: Any = typer.main.get_command(app)
    found = commands.commands["gateway"].params
    return {str(option.envvar) for option in found if option.envvar}


def test_every_setting_of_the_gateway_is_passed_to_it(compose: dict[str, Any]) -> None:
    environment = compose["services"]["gateway"]["environment"]
    given = {name for name in environment if name.startswith("TOKENMILL_")}
    assert given == gateway_variables() - {"TOKENMILL_GATEWAY_OPEN"}  # there is a key for it


def test_gateway_and_tasks_have_one_store_of_files(compose: dict[str, Any]) -> None:
    gateway, tasks = (compose["services"][name] for name in ("gateway", "tasks"))
    for name in ("TOKENMILL_FILES", *(n for n in gateway["environment"] if n.startswith("AWS_"))):
        assert gateway["environment"][name] == tasks["environment"][name]
    folder = plain(gateway["environment"]["TOKENMILL_FILES"])
    for service in (gateway, tasks):
        assert f"files:{folder}" in service["volumes"]
    assert re.search(rf"install -d -o tokenmill .*{folder}\b", DOCKERFILE)  # its owner's, at first


def test_the_gateway_has_its_own_users_and_the_time_of_a_drain(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    values = {name: plain(value) for name, value in gateway["environment"].items()}
    for name, kind in (("REDIS_URL", "REDIS"), ("DATABASE_URL", "POSTGRES")):
        url = urlsplit(values[f"TOKENMILL_{name}"])
        assert (url.username, url.password) == ("gateway", f"{kind}_GATEWAY_PASSWORD")
    port = values["TOKENMILL_GATEWAY_PORT"]
    assert f":{port}/readyz" in gateway["healthcheck"]["test"][-1]
    assert [plain(each) for each in gateway["ports"]] == [f"127.0.0.1:8080:{port}"]
    grace = float(gateway["stop_grace_period"].removesuffix("s"))
    assert grace > float(values["TOKENMILL_GATEWAY_DRAIN_SECONDS"]) + 10
    assert "'gateway'" in DOCKERFILE  # the extra


def test_the_gateway_s_role_has_its_rights_before_the_gateway_starts(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    done = "service_completed_successfully"
    assert services["gateway"]["depends_on"]["rights"]["condition"] == done
    assert services["rights"]["depends_on"]["migrate"]["condition"] == done
    (folder,) = services["rights"]["volumes"]
    assert (ROOT / folder.split(":")[0] / "gateway.sql").is_file()
    secret = services["gateway"]["environment"]["TOKENMILL_GATEWAY_KEY_SECRET"]
    assert services["keys"]["environment"]["TOKENMILL_GATEWAY_KEY_SECRET"] == secret
    for name in services["keys"]["environment"]:
        assert name in gateway_variables()
