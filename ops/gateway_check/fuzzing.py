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
from tests.gateway.conftest import MODEL, Gateway, new_key, running_gateway
from tests.support.valkey import ControlledValkey
from tests.support.worker import database_url, running_worker
from tokenmill_gateway.app import ALL_CALLS
from tokenmill_gateway.openapi import document_of
from tokenmill_schemas.openai import RESPONSES_URL

JUDGE = ("schemathesis==4.32.5",)
CHECKS = ",".join([
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance",
])  # fmt: skip
NUM_IDS = 40
EACH_EXAMPLE = 35  # requests that schemathesis sends for an example
_SENT = re.compile(r"(\d[\d,]*) generated")


async def made_ids(gateway: Gateway, key: str) -> dict[str, list[str]]:
    """Return ids of things that are there, by the name that their parameter has."""
    body = {"model": MODEL, "input": "Hi"}
    line = {"custom_id": "a", "method": "POST", "url": RESPONSES_URL, "body": body}
    found: dict[str, list[str]] = {"response_id": [], "file_id": [], "batch_id": []}
    async with gateway.client(key) as client:
        for number in range(NUM_IDS):
            response = await client.responses.create(
                model=MODEL, input="Hi", max_output_tokens=4, background=number % 2 == 0
            )
            file = await client.files.create(
                file=("in.jsonl", json.dumps(line).encode()), purpose="batch"
            )
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=RESPONSES_URL, completion_window="24h"
            )
            found["response_id"].append(response.id)
            found["file_id"].append(file.id)
            found["batch_id"].append(batch.id)
    return found


def document(ids: dict[str, list[str]]) -> dict[str, Any]:
    """Return the API's document with the model and the ids that there are; answers are short."""
    found = document_of(ALL_CALLS)
    schemas = found["components"]["schemas"]
    for name in ("ChatBody", "CompletionBody", "ResponseBody"):
        members = schemas[name]["properties"]
        members["model"] = {"const": MODEL}
        for length in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if length in members:
                members[length] = {"type": "integer", "minimum": 1, "maximum": 8}
    schemas["BatchInput"]["properties"]["input_file_id"] = {"enum": ids["file_id"]}
    schemas["ResponseBody"]["properties"]["previous_response_id"] = {
        "enum": [None, *ids["response_id"]]
    }
    for path in found["paths"].values():
        for operation in path.values():
            for parameter in operation["parameters"]:
                if parameter["name"] in ids:
                    parameter["schema"] = {"enum": ids[parameter["name"]]}
                elif parameter["name"] == "model":
                    parameter["schema"] = {"enum": [MODEL, "other"]}
    return found


async def judged(
    judge: str, url: str, key: str, folder: Path, seed: int, examples: int
) -> tuple[int, int]:
    """Return the exit status of one run, and how many requests it sent."""
    command = [
        judge, "run", str(folder / "openapi.json"), "--url", url, "--checks", CHECKS,
        "--header", f"Authorization: Bearer {key}", "--max-examples", str(examples),
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
        database = database_url(folder)
        key = new_key(database, "acme")
        sent = failed = 0
        async with (
            running_worker(server.url, database),
            running_gateway(
                server.url, database, is_open=False, files=str(folder / "files")
            ) as gateway,
        ):
            seed = first_seed
            while sent < wanted:
                ids = await made_ids(gateway, key)
                (folder / "openapi.json").write_text(json.dumps(document(ids)), encoding="utf-8")
                examples = max(1, min(200, (wanted - sent) // EACH_EXAMPLE))
                status, number = await judged(judge, gateway.url, key, folder, seed, examples)
                sent, failed, seed = sent + number, failed + (status != 0), seed + 1
                print(f"{sent} of {wanted} requests, {failed} runs with a failure", flush=True)
    return 1 if failed else 0
