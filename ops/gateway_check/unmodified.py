"""Runs the script of each client against the service, and prints what each could do."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Sequence
from typing import Final

from ops.gateway_check.environments import CLIENTS, SCRIPTS
from ops.gateway_check.service import MODEL, Serving, running_service

THINGS: Final = ("plain", "stream", "structured", "tools", "resume", "conversation", "batch")
LIMIT_S: Final = 1800.0
Results = dict[str, dict[str, str | None]]  # of an API: each thing and its error


async def check(names: Sequence[str]) -> int:
    """Run the clients of these names, or all; return 1 if one of them failed at something."""
    commands = {name: CLIENTS[name].command(name) for name in names or CLIENTS}
    found: dict[str, Results] = {}
    async with running_service() as service:
        for name, command in commands.items():
            found[name] = await tried(name, command, service)
    print("\n".join(table(found)), flush=True)
    errors = [e for apis in found.values() for done in apis.values() for e in done.values()]
    return 1 if any(error is not None for error in errors) else 0


async def tried(name: str, command: Sequence[str], service: Serving) -> Results:
    """Run a script and return what it tried."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "OPENAI_", "TOKENMILL_"))
    } | {
        "OPENAI_BASE_URL": f"{service.url}/v1", "OPENAI_API_KEY": service.key, "MODEL": MODEL,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else litellm asks the network at its import
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, cwd=SCRIPTS.parent, env=variables,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            said, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        said, errors = (await process.communicate())[0], b"it did not end"
    found: Results = {}
    for line in said.decode().splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            found.setdefault(one["api"], {})[one["thing"]] = one["error"]
            words = one["error"] or "ok"
            print(f"[gateway-check] {name}: {one['api']}, {one['thing']}: {words}", flush=True)
    if process.returncode:
        words = errors.decode(errors="replace").strip()[-1000:]
        print(f"[gateway-check] {name}: ended with {process.returncode}: {words}", flush=True)
        found["the script"] = {"plain": words}
    elif not found:
        found["the script"] = {"plain": "it tried nothing"}
    return found


def table(found: dict[str, Results]) -> Iterable[str]:
    """Yield the lines of a table of Markdown: what passed, failed, or a client does not offer."""
    yield f"| client | API | {' | '.join(THINGS)} |"
    yield f"|---|---|{'---|' * len(THINGS)}"
    for name, apis in found.items():
        for api, done in apis.items():
            cells = [
                "–" if thing not in done else "passed" if done[thing] is None else "FAILED"
                for thing in THINGS
            ]
            yield f"| {shown(name)} | {api} | {' | '.join(cells)} |"


def shown(name: str) -> str:
    """Return a client's name with its version."""
    for requirement in CLIENTS[name].requirements:
        return f"{name} {requirement.rpartition('@' if '@' in requirement else '==')[2]}"
    return name
