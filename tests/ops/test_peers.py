"""Peers of `ops/bench engine`: static batching in torch, llama.cpp's server behind real HTTP."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ops.benchmarks.compare.comparison import options_for
from ops.benchmarks.measure.figures import of_round
from ops.benchmarks.measure.protocol import EngineOptions
from ops.benchmarks.measure.workload_files import Workload, WorkloadRequest
from ops.benchmarks.peers.llamacpp_server import LlamaCpp
from ops.benchmarks.peers.ours import Tokenmill
from ops.benchmarks.peers.static_batching import StaticBatching
from tests.engine.truth import tiny_models

REQUESTS = tuple(
    WorkloadRequest(tuple(range(5 + number, 9 + 2 * number)), tokens)
    for number, tokens in enumerate((6, 2, 4, 3, 5))
)


@pytest.mark.model
def test_static_batches_give_our_tokens_and_leave_places_empty(tmp_path: Path) -> None:
    options = EngineOptions(
        model=str(tiny_models.save("llama", tmp_path)), pool_tokens=1024, max_sequences=2
    )
    static, ours = StaticBatching(options), Tokenmill(options)
    measured = static.run(REQUESTS)
    assert measured.tokens == ours.run(REQUESTS).tokens
    assert measured.batch_sizes == [2, 2, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1]
    assert measured.first_s[0] == measured.first_s[1] < measured.first_s[2], (
        "a batch waits for the one before"
    )
    assert of_round(Workload("five", REQUESTS), measured)["places_used"] == pytest.approx(20 / 30)
    ours.close()
    static.close()


def test_a_round_does_not_find_the_prompts_of_an_earlier_one() -> None:
    ours = Tokenmill(EngineOptions(model="synthetic", pool_tokens=1024, max_sequences=2))
    for _ in range(2):
        ours.run((WorkloadRequest(tuple(range(65, 105)), 2),))
    assert ours._engine.stats().cached_tokens == 0
    ours.close()


class Server(BaseHTTPRequestHandler):
    """Answers as llama.cpp's server does: the prompt's first id again and again."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion"
        assert asked["temperature"] == 0
        assert not asked["cache_prompt"], "a round must not find the earlier one's prompts"
        count = asked["n_predict"] if asked["prompt"][0] else 1
        timings = {"predicted_n": count, "predicted_ms": 0.0}
        body = json.dumps({"tokens": asked["prompt"][:1] * count, "timings": timings}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def llamacpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaCpp]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    wheel: Any = ModuleType("xllamacpp")
    wheel.__version__ = "1"
    wheel.CommonParams = lambda: SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )
    wheel.Server = lambda _params: SimpleNamespace(
        listening_address=f"http://127.0.0.1:{server.server_port}"
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", wheel)
    yield LlamaCpp(EngineOptions(model="/models/a.gguf", threads=1))
    server.shutdown()
    thread.join()
    server.server_close()


def test_llamacpp_is_asked_for_all_requests_at_once(llamacpp: LlamaCpp) -> None:
    measured = llamacpp.run(REQUESTS)
    assert measured.tokens == [[r.prompt[0]] * r.max_tokens for r in REQUESTS]
    assert max(measured.first_s) <= measured.wall_s
    assert llamacpp.description == "llama.cpp (xllamacpp 1), 32 slots, 1 threads, a.gguf"


def test_an_answer_that_is_too_short_is_no_measurement(llamacpp: LlamaCpp) -> None:
    with pytest.raises(RuntimeError, match="1 tokens of 3"):
        llamacpp.run((WorkloadRequest((0, 1), 3),))


def test_llamacpp_reads_the_models_own_file() -> None:
    given = EngineOptions(model="/models/a.gguf", settings={"block_size": 8})
    chosen = options_for("llamacpp", given)
    assert (chosen.model, chosen.settings) == ("/models/a.gguf", {})
    with pytest.raises(ValueError, match="needs a model of one GGUF file"):
        options_for("llamacpp", EngineOptions(model="synthetic"))
