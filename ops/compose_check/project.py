"""A compose project of its own: its variables, commands and containers."""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 1500.0  # of a first start: fetching and converting the model, compiling kernels
_OURS = ("TOKENMILL_", "REDIS_", "POSTGRES_", "GATEWAY_", "COMPOSE_")


class CheckFailed(Exception):
    """A check found something else than docker-compose.yml promises."""


class ComposeProject:
    """The services of docker-compose.yml as project `tokenmill-check`, in a copy of the checkout.

    What a person would change stands in `.env` of `folder`; `log` gets every command's output.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        folder.mkdir()
        log.write_text("")
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        pack = ["tar", "--null", "--ignore-failed-read", "-T", "-", "-cf", "-"]
        packed = subprocess.run(pack, cwd=ROOT, input=files.stdout, capture_output=True, check=True)
        subprocess.run(["tar", "-xf", "-"], cwd=folder, input=packed.stdout, check=True)
        self.run([str(folder / "ops/secrets")])
        has_plugin = subprocess.run(["docker", "compose", "version"], capture_output=True)
        self._command = ["docker-compose"] if has_plugin.returncode else ["docker", "compose"]

    @property
    def variables(self) -> dict[str, str]:
        lines = (self.folder / ".env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def change(self, **variables: str | None) -> None:
        """Write variables to `.env`; None removes one."""
        kept = {
            name: each for name, each in (self.variables | variables).items() if each is not None
        }
        lines = [f"{name}={value}\n" for name, value in kept.items()]
        (self.folder / ".env").write_text("".join(lines))

    def compose(self, *arguments: str) -> str:
        return self.run([*self._command, *arguments])

    def shell(self, script: str) -> str:
        """Run a guide's commands in the folder, with the compose that is here."""
        if self._command == ["docker-compose"]:
            script = script.replace("docker compose ", "docker-compose ")
        return self.run(["bash", "-euo", "pipefail", "-c", script])

    def run(self, command: Sequence[str]) -> str:
        """Run a command and return its output; raises CheckFailed with the end of its messages."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(_OURS)
        }  # the shell's would win over those of .env
        result = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        with self.log.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n{result.stdout}{result.stderr}\n")
        if result.returncode:
            tail = " / ".join((result.stderr or result.stdout).strip().splitlines()[-4:])
            raise CheckFailed(
                f"{shlex.join(command)[:80]}: exit status {result.returncode}: {tail}"
            )
        return result.stdout

    def logs(self, container: str) -> list[str]:
        result = subprocess.run(["docker", "logs", container], capture_output=True, text=True)
        return (result.stdout + result.stderr).splitlines()

    def containers(self, service: str) -> list[dict[str, Any]]:
        """Return what Docker knows of a service's containers."""
        ids = self.compose("ps", "-a", "-q", service).split()
        found: list[dict[str, Any]] = (
            json.loads(self.run(["docker", "inspect", *ids])) if ids else []
        )
        return found

    def up(self, *arguments: str) -> float:
        """Start what is not as the variables say; return the seconds until all is healthy."""
        started = time.monotonic()
        self.compose("up", "-d", *arguments)
        self.wait_healthy()
        return time.monotonic() - started

    def wait_healthy(self, limit_s: float = START_S) -> None:
        """Wait for each service's health; one that Docker calls unhealthy ends the waiting."""

        def is_healthy() -> bool:
            states = {
                container["Name"].lstrip("/"): container["State"]
                for service in self.compose("config", "--services").split()
                for container in self.containers(service)
            }
            wrong = [
                f"{name} is {state['Health']['Status']}"
                if state["Status"] == "running"
                else f"{name} ended with {state['ExitCode']}"
                for name, state in states.items()
                if state.get("Health", {}).get("Status") == "unhealthy"
                or (state["Status"] == "exited" and state["ExitCode"] != 0)
                or state["Status"] == "restarting"
            ]
            if wrong:
                raise CheckFailed(", ".join(wrong))
            return all(
                state.get("Health", {}).get("Status", "healthy") == "healthy"
                for state in states.values()
            )

        self.wait_until(is_healthy, "every container is healthy", limit_s)

    def wait_until(self, is_so: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
        until = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > until:
                raise CheckFailed(f"after {limit_s:.0f} s it is not so that {what}")
            time.sleep(0.5)

    def remove(self) -> None:
        """Remove the containers, the network and the volumes."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "100")
