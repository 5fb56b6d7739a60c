"""Runs a gateway before a worker without a model, and schemathesis against it until enough requests
were sent.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from ops.gateway_check.environments import environment
from tests.gateway.conftest import MODEL, new_key, running_gateway
from tests.support.valkey import ControlledValkey
from tests.support.worker import database_url, running_worker
from tokenmill_gateway.app import ALL_CALLS
from tokenmill_gateway.openapi import document_of

JUDGE = ("schemathesis==4.32.5",)
CHECKS = ",".join([
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance",
])  # fmt: skip
_SENT = re.compile(r"(\d[\d,]*) generated")


def document() -> dict[str, Any]:
    """Return the API's document with the one model that there is, and short answers."""
    found = document_of(ALL_CALLS)
    for name in ("ChatBody", "CompletionBody", "ResponseBody"):
        members = found["components"]["schemas"][name]["properties"]
        members["model"] = {"const": MODEL}
        for length in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if length in members:
                members[length] = {"type": "integer", "minimum": 1, "maximum": 8}
    return found


async def judged(judge: str, url: str, key: str, folder: Path, seed: int) -> tuple[int, int]:
    """Return the exit status of one run, and how many requests it sent."""
    command = [
        judge, "run", str(folder / "openapi.json"), "--url", url, "--checks", CHECKS,
        "--header", f"Authorization: Bearer {key}", "--max-examples", "200",
        "--seed", str(seed), "--request-timeout", "60", "--suppress-health-check", "all",
        "--generation-database", "none", "--continue-on-failure", "--no-color",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    text = (await process.communicate())[0].decode()
    sys.stdout.write(text)
    sent = [int(found.replace(",", "")) for found in _SENT.findall(text)]
    if not sent:
        raise SystemExit("schemathesis did not say how many requests it sent")
    assert process.returncode is not None
    return process.returncode, sent[-1]


async def check(wanted: int, first_seed: int) -> int:
    """Send the requests; return 1 if an answer was 5xx or did not fit its schema."""
    judge = str(environment("schemathesis", JUDGE) / "bin" / "schemathesis")
    with (
        tempfile.TemporaryDirectory() as name,
        ControlledValkey(Path(name) / "valkey", persistent=False) as server,
    ):
        folder = Path(name)
        (folder / "openapi.json").write_text(json.dumps(document()), encoding="utf-8")
        database = database_url(folder)
        key = new_key(database, "acme")
        sent = failed = 0
        async with (
            running_worker(server.url, database),
            running_gateway(server.url, database, is_open=False) as gateway,
        ):
            seed = first_seed
            while sent < wanted:
                status, number = await judged(judge, gateway.url, key, folder, seed)
                sent, failed, seed = sent + number, failed + (status != 0), seed + 1
                print(f"{sent} of {wanted} requests, {failed} runs with a failure", flush=True)
    return 1 if failed else 0
