"""`ops/bench restart`: first tokens behind what the last engine computed: cold, and from disk.

For each length an engine computes a prompt and 16 tokens, and is closed in the middle of its
answer, as a draining worker's. New engines then get the prompt again (a restart), and the prompt
with these tokens (a hand-over). The files are dropped from the system's memory before.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console

from ops.benchmarks.measure.generation import generate
from ops.benchmarks.measure.quiet import wait_until_quiet
from ops.benchmarks.measure.tables import show
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own import EngineConfig, SamplingParams
from tokenmill_worker.engines.own.engine import Engine

PARAMS = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
KEPT = 16  # tokens of the answer before the first engine is closed
COLUMNS = {
    "first_ms": ("first token\nms", ""),
    "share": ("of the\ncold time", "{:.2f}"),
    "hit": ("from the\ncache", "{:.1%}"),
    "same": ("same\ntokens", ""),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1500, 8000])
    parser.add_argument("--rounds", type=int, default=3)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    found: dict[str, dict[str, object]] = {}
    for length in arguments.tokens:
        rounds = [_round(arguments.model, length) for _ in range(arguments.rounds)]
        for case in rounds[0]:
            figures = [one[case] for one in rounds]
            name = f"{length:,} tokens, {case}"
            found[name] = {key: statistics.median(f[key] for f in figures) for key in figures[0]}
            found[name]["same"] = "yes" if all(f["same"] for f in figures) else "NO"
    show(Console(), arguments.model, found, COLUMNS)
    return {"cases": found, "ok": all(case["same"] == "yes" for case in found.values())}


def _round(model: str, length: int) -> dict[str, dict[str, float]]:
    prompt = tuple(5 + (i * 31 + i * i) % 4000 for i in range(length))
    with tempfile.TemporaryDirectory(prefix="tokenmill-blocks-") as folder:
        answer, cold = _measure(model, folder, prompt, (), stop_after=KEPT)
        again, restarted = _measure(model, folder, prompt, ())
        rest, handed_over = _measure(model, folder, prompt, answer)
    for figures in (restarted, handed_over):
        figures["share"] = figures["first_ms"] / cold["first_ms"]
    restarted["same"] = handed_over["same"] = again == answer + rest
    return {"cold": cold, "after a restart": restarted, "after a hand-over": handed_over}


def _measure(
    model: str,
    folder: str,
    prompt: tuple[int, ...],
    resumed: tuple[int, ...],
    stop_after: int = 10**9,
) -> tuple[tuple[int, ...], dict[str, float]]:
    """Return the tokens of a new engine, and the figures of its first one."""
    _drop_pages(Path(folder))
    settings = EngineConfig(model=model, cache_disk=folder, verify_model=False)
    engine = Engine.load(settings)
    generate(engine, [[7] * 40], [SamplingParams(max_tokens=2, temperature=0.0)])
    wait_until_quiet()
    started, first_ms, num_cached, has_ended = time.perf_counter(), 0.0, 0, False
    answer: tuple[int, ...] = ()
    request = GenerationRequest(
        request_id="measured", prompt=Prompt(prompt), params=PARAMS,
        resumed=(resumed,) if resumed else (),
    )  # fmt: skip
    engine.submit([request])
    while not has_ended and len(answer) < stop_after:
        events = engine.step()
        for event in events:
            if event.error:
                raise RuntimeError(event.error)
            answer += event.token_ids
            num_cached = num_cached or event.num_cached_tokens
            has_ended |= event.finish_reason is not None
        if not events and engine.waits_only:
            time.sleep(0.001)
        if answer and not first_ms:
            first_ms = (time.perf_counter() - started) * 1e3
    engine.close()
    return answer, {"first_ms": first_ms, "hit": num_cached / len(prompt), "same": True}


def _drop_pages(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
