"""A shuffled file of templates: in the order that `tokenmill.bulk` gives it, in its own order, and
through `vllm run-batch`, with a KV cache that holds four templates.

With `--beside`, two other tenants submit jobs with deadlines meanwhile: one interactive ones, one
bulk ones.
"""

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from unittest.mock import patch

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.peers.child import VLLM_VARIABLES, ChildError
from ops.demonstration.stack import DemoStack
from tokenmill import Client
from tokenmill.bulk import Paths, open_store, pending_lines, run_batch
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.engines.own.model.model_files import resolve

TEMPLATE, ROW, ANSWER, PLACES, HELD = 512, 16, 4, 8, 4  # tokens, sequences, templates in the cache
TAIL = 5  # tokens behind a row, in ChatML
VLLM_BLOCK = 32  # tokens: the least on a CPU
FRAME = 48  # tokens of a chat's frame, at most
POOL = HELD * TEMPLATE + PLACES * (FRAME + ROW + ANSWER)  # tokens
# each is one token of usual vocabularies, with the space before it
WORDS = (
    " time", " year", " people", " way", " day", " man", " thing", " woman", " life", " child",
    " world", " school", " state", " family", " group", " country", " problem", " hand", " part",
    " place", " case", " week", " company", " system", " program", " question", " work", " number",
)  # fmt: skip
# class of the jobs beside the file → seconds between two, and to the deadline of each
BESIDE = {"interactive": (0.5, 5.0), "bulk": (1.0, 20.0)}
Case = dict[str, float]


def measure(arguments: argparse.Namespace) -> dict[str, Case]:
    """Return figures by case. With VLLM_PYTHON, vLLM runs the file last."""
    cases = {"in the file's order": _ours(arguments, is_grouped=False)}
    cases["template by template"] = _ours(arguments, is_grouped=True)
    arguments.keep({"results": {"templates": cases}})
    if python := os.environ.get("VLLM_PYTHON"):
        cases["vllm run-batch"] = _theirs(arguments, Path(python))
    base = cases["in the file's order"]["lines_s"]
    for case in cases.values():
        case["ratio"] = case["lines_s"] / base
    return cases


def _write(path: Path, arguments: argparse.Namespace) -> None:
    """Write chats, since vLLM's batches take no completions."""
    draw = random.Random("templates")
    is_synthetic = arguments.model.startswith("synthetic")  # a letter is a token

    def text(count: int) -> str:
        letters, words = "".join(draw.choices("abcdefgh", k=count)), draw.choices(WORDS, k=count)
        return letters if is_synthetic else "".join(words)

    templates = [text(TEMPLATE) for _ in range(arguments.templates)]
    places = [number % arguments.templates for number in range(arguments.lines)]
    draw.shuffle(places)
    with path.open("w") as file:
        for number, place in enumerate(places):
            messages = [{"role": "user", "content": templates[place] + text(ROW)}]
            body = {"model": arguments.model, "messages": messages}
            body |= {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")


def _ours(arguments: argparse.Namespace, *, is_grouped: bool) -> Case:
    with DemoStack(arguments.model, "bench", _settings(arguments.model)) as stack:
        stack.start(lambda _: None)
        source, paths = stack.directory / "in.jsonl", Paths.of(stack.directory / "out.jsonl")
        _write(source, arguments)
        with Client(stack.redis_url, queue=stack.queue, database=stack.database_url) as client:
            store, began = open_store(client), time.monotonic()
            alike = nullcontext() if is_grouped else patch.object(pending_lines, "fingerprint", _no)
            others = _beside(client, BESIDE if arguments.beside else {})
            with closing(store), alike, others as beside:
                totals = run_batch(client, store, source, paths).totals
                wall_s = time.monotonic() - began
    frame = totals.input_tokens / arguments.lines - TEMPLATE - ROW  # of each chat, as the same text
    unique = arguments.templates * TEMPLATE + arguments.lines * (ROW + TAIL) + frame
    computed = (totals.input_tokens - totals.cached_tokens) / unique
    return {
        "completed": totals.completed,
        "computed": computed,
        "lines_s": arguments.lines / wall_s,
        **beside,
    }


@contextmanager
def _beside(client: Client, classes: Mapping[str, tuple[float, float]]) -> Iterator[Case]:
    """Submit jobs of these classes in the context, each from a tenant of its own, and yield what
    has their figures behind it.
    """
    figures: Case = {}
    jobs: dict[str, list[str]] = {priority: [] for priority in classes}
    is_over = Event()

    def submit(priority: str) -> None:
        pause_s, deadline_s = classes[priority]
        while True:
            text = f"{len(jobs[priority])} {priority}" + "".join(WORDS)
            jobs[priority].append(
                client.submit(
                    prompt=text, max_tokens=ANSWER, ignore_eos=True, tenant=priority,
                    priority=priority, deadline=deadline_s,
                )
            )  # fmt: skip
            if is_over.wait(pause_s):
                return

    threads = [Thread(target=submit, args=(priority,)) for priority in classes]
    for thread in threads:
        thread.start()
    try:
        yield figures
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    for priority, submitted in jobs.items():
        done = [client.result(job, timeout=60) for job in submitted]
        took_s = [
            (each.finished_ms - each.created_ms) / 1000
            for each in done
            if each.status is JobStatus.SUCCEEDED
        ]
        figures[f"{priority}_kept"] = len(took_s) / len(done)
        figures[f"{priority}_p50"] = percentile(took_s, 0.5)
        figures[f"{priority}_p99"] = percentile(took_s, 0.99)


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
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        _write(source, arguments)
        command = [str(python), "-m", "vllm.entrypoints.openai.run_batch", "-i", str(source)]
        command += ["-o", str(output), "--model", str(resolve(arguments.model))]
        command += ["--served-model-name", arguments.model, "--dtype", "float32"]
        command += ["--enforce-eager", "--disable-log-stats", "--max-num-seqs", str(PLACES)]
        command += ["--max-model-len", "1024", "--block-size", str(VLLM_BLOCK)]
        command += ["--num-gpu-blocks-override", str(POOL // VLLM_BLOCK)]
        variables = {**VLLM_VARIABLES, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1"}
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        began, said = 0.0, b""
        with subprocess.Popen(
            command, env={**os.environ, **variables, "PATH": path},
            stderr=subprocess.STDOUT, stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                said = (said + line)[-4000:]
                if not began and b"Reading batch from" in line:
                    began = time.time()
        if not output.exists():
            raise ChildError(f"vLLM's batch has no output: {said.decode(errors='replace')}")
        wall_s = output.stat().st_mtime - began
        answers = [json.loads(line) for line in output.open()]
    completed = sum(answer["response"]["status_code"] == 200 for answer in answers)
    return {"completed": completed, "lines_s": arguments.lines / wall_s}
