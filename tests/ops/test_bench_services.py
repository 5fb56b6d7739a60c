"""Services of `ops/bench service --engine vllm` with the synthetic engine and a server that stands
in for vLLM's: jobs are served, and deaths of their parts are counted.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.benchmarks.commands import engine
from ops.benchmarks.measure.figures import Arrivals
from ops.benchmarks.measure.workloads import Workload, WorkloadRequest
from ops.benchmarks.peers.service import ReceivedTokens

WORKLOAD = Workload(
    "letters", tuple(WorkloadRequest((65 + n, 66, 67, 68 + n), 50) for n in range(4))
)
# Answers with the numbers 0, 1, 2 and so on, one every 20 ms, as the server of vLLM does.
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        for number in range(body["max_tokens"]):
            event = {"choices": [{"token_ids": [number]}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
            time.sleep(0.02)
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *arguments):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def measured(tmp_path: Path, name: str, model: str, *, kills: bool) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    engine.add_options(parser)
    arguments = parser.parse_args(["--rounds", "1", "--model", model, "--pool-tokens", "4096"])
    arguments.keep = lambda record: (tmp_path / "kept.json").write_text(json.dumps(record))
    arguments.logs, arguments.kills = tmp_path, kills
    record = engine.compare(arguments, [name], [WORKLOAD])
    assert "error" not in record, record["error"]
    assert json.loads((tmp_path / "kept.json").read_text())["results"] == record["results"]
    figures: dict[str, Any] = record["results"]["letters"][name]
    return figures


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model's folder, for which the Python of vLLM's environment finds our server."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.redis
def test_the_service_loses_and_repeats_no_token_when_its_parts_die(tmp_path: Path) -> None:
    found = measured(tmp_path, engine.WHOLE_WAY, "synthetic?step_ms=20", kills=True)
    assert set(found["kills"]) == {"worker", "engine process"}
    assert (found["lost"], found["repeated"]) == (0, 0)
    assert all(kill["pause_s"] > 0 for kill in found["kills"].values())


@pytest.mark.slow
@pytest.mark.redis
def test_a_loop_before_a_server_repeats_answers_when_its_parts_die(
    tmp_path: Path, served: str
) -> None:
    found = measured(tmp_path, engine.SERVED_VLLM, served, kills=True)
    assert found["output_tok_s"] > 0
    assert set(found["kills"]) == {"worker", "server"}
    assert found["lost"] == 0
    assert min(kill["repeated"] for kill in found["kills"].values()) > 0


@pytest.mark.slow
@pytest.mark.redis
def test_celery_before_a_server_serves_the_jobs(tmp_path: Path, served: str) -> None:
    found = measured(tmp_path, engine.CELERY, served, kills=False)
    assert found["output_tok_s"] > 0 < found["ttft_p50_ms"]


def test_tokens_that_come_again_count_as_repeated() -> None:
    arrivals = Arrivals()
    received = ReceivedTokens(arrivals)
    received.take(0, [5, 6, 7])
    received.take(0, [5, 6])
    received.take(2, [7, 8, 9])
    assert (received.tokens, received.repeated) == ([5, 6, 7, 8, 9], 3)
    assert arrivals.num_tokens == 5


def test_tokens_behind_a_gap_are_counted_once() -> None:
    arrivals = Arrivals()
    received = ReceivedTokens(arrivals)
    received.take(0, [5])
    received.take(3, [8, 9])
    assert (arrivals.num_tokens, received.repeated) == (3, 0)
