"""A shuffled file of templates: in the order that `tokenmill.bulk` gives it, in its own order, and
through `vllm run-batch`, with a KV cache that holds four templates.
"""

import argparse
import json
import os
import random
import subprocess
import time
from contextlib import closing, nullcontext
from pathlib import Path
from unittest.mock import patch

from ops.demonstration.stack import DemoStack
from tokenmill import Client
from tokenmill.bulk import Paths, open_store, pending_lines, run_batch
from tokenmill_worker.engines.own.model.model_files import resolve

TEMPLATE, ROW, ANSWER, PLACES, HELD = 512, 16, 4, 8, 4  # tokens, sequences, templates in the cache
POOL = HELD * TEMPLATE + PLACES * (ROW + ANSWER)  # tokens
Case = dict[str, float]


def measure(arguments: argparse.Namespace) -> dict[str, Case]:
    """Return figures by case. With VLLM_PYTHON, vLLM runs the file last."""
    cases = {
        "in the file's order": _ours(arguments, is_grouped=False),
        "template by template": _ours(arguments, is_grouped=True),
    }
    if python := os.environ.get("VLLM_PYTHON"):
        cases["vllm run-batch"] = _theirs(arguments, Path(python))
    base = cases["in the file's order"]["lines_s"]
    for case in cases.values():
        case["ratio"] = case["lines_s"] / base
    return cases


def _write(path: Path, arguments: argparse.Namespace) -> None:
    draw = random.Random("templates")
    known = (0, 256) if arguments.model.startswith("synthetic") else (100, 40_000)  # tokens

    def ids(count: int) -> list[int]:
        return [draw.randrange(*known) for _ in range(count)]

    templates = [ids(TEMPLATE) for _ in range(arguments.templates)]
    places = [number % arguments.templates for number in range(arguments.lines)]
    draw.shuffle(places)
    with path.open("w") as file:
        for number, place in enumerate(places):
            body = {"model": arguments.model, "prompt": templates[place] + ids(ROW)}
            body |= {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")


def _ours(arguments: argparse.Namespace, *, is_grouped: bool) -> Case:
    with DemoStack(arguments.model, "bench", _settings(arguments.model)) as stack:
        stack.start(lambda _: None)
        source, paths = stack.directory / "in.jsonl", Paths.of(stack.directory / "out.jsonl")
        _write(source, arguments)
        with Client(stack.redis_url, queue=stack.queue, database=stack.database_url) as client:
            store, began = open_store(client), time.monotonic()
            alike = nullcontext() if is_grouped else patch.object(pending_lines, "fingerprint", _no)
            with closing(store), alike:
                totals = run_batch(client, store, source, paths).totals
            wall_s = time.monotonic() - began
    unique = arguments.templates * TEMPLATE + arguments.lines * ROW
    computed = (totals.input_tokens - totals.cached_tokens) / unique
    return {
        "completed": totals.completed,
        "computed": computed,
        "lines_s": arguments.lines / wall_s,
    }


def _settings(model: str) -> dict[str, object]:
    """Return the settings of a worker whose cache holds four templates."""
    if model.startswith("synthetic"):
        return {"max_num_seqs": 2}  # 65 blocks of 16 tokens each
    config = json.loads((resolve(model) / "config.json").read_text())
    width = config["num_key_value_heads"] * config.get("head_dim", 64)
    size = 2 * 4 * config["num_hidden_layers"] * width  # bytes of a token's keys and values
    return {"max_num_seqs": PLACES, "max_memory_gib": POOL * size / 2**30, "dtype": "float32"}


def _no(_: object) -> tuple[bytes, ...]:
    return ()


def _theirs(arguments: argparse.Namespace, python: Path) -> Case:
    """Measure from the reading of the file to the output: start and loading do not count."""
    with DemoStack(arguments.model, "bench") as stack:
        source, output = stack.directory / "in.jsonl", stack.directory / "out.jsonl"
        _write(source, arguments)
        command = [str(python.parent / "vllm"), "run-batch", "-i", str(source), "-o", str(output)]
        command += ["--model", str(resolve(arguments.model)), "--dtype", "float32"]
        command += ["--served-model-name", arguments.model, "--enforce-eager"]
        command += ["--max-num-seqs", str(PLACES), "--max-model-len", "2048", "--block-size", "16"]
        command += ["--num-gpu-blocks-override", str(POOL // 16), "--disable-log-stats"]
        began = 0.0
        with subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not began and b"Reading batch from" in line:
                    began = time.time()
        wall_s = output.stat().st_mtime - began
        completed = sum(1 for line in output.open() if '"status_code":200' in line)
    return {"completed": completed, "lines_s": arguments.lines / wall_s}
