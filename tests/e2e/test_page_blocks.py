"""Every code block of README, guides, runbook and the pages for contributors is run by a test, or
is named here with the reason why none can.

Blocks of shell commands run in this file, line by line as a reader would paste them.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.pages import GUIDES, ROOT, blocks, run_shell
from tests.support.worker import QUEUE, database_url, running_worker

PAGES = [
    ROOT / "README.md",
    *sorted(GUIDES.glob("*.md")),
    *(ROOT / "ops" / name for name in ("runbook.md", "architecture.md", "contributing.md")),
    ROOT / "migrations" / "README.md",
]

# page → the test that runs all its blocks of Python
PYTHON = {
    "README.md": "test_the_example_prints_a_streamed_answer",
    "bring-your-own-engine.md": "test_the_skeleton_of_the_guide_is_the_example",
    "bulk.md": "test_python_in_the_guides_runs",
    "celery.md": "test_a_webhook_is_verified_as_in_the_guide, test_the_guide_s_code_runs",
    "client.md": "test_python_in_the_guides_runs, test_the_tool_of_the_guide_is_called",
    "engine.md": "test_every_block_of_the_guide_runs",
    "gateway.md": "test_the_guide_of_the_gateway_runs",
    "models.md": "test_an_adapter_is_named_as_in_the_guide",
    "protocol.md": "test_the_reader_of_the_protocol_page_reads_the_text_of_the_result",
    "quickstart.md": "test_python_in_the_guides_runs",
    "streaming.md": "test_python_in_the_guides_runs",
    "structured-output.md": "test_the_guide_of_structured_output_runs",
}

# (page, a line of the block) of the shell blocks that run here
SHELL_FAST = [
    ("README.md", "tokenmill bulk run in.jsonl -o out.jsonl"),
    ("bulk.md", "tokenmill bulk run in.jsonl -o out.jsonl"),
    ("celery.md", "tokenmill webhooks secret --new"),
    ("deployment.md", 'tokenmill submit --queue my-model --chat "Hello?" --stream'),
    ("streaming.md", "tokenmill tail $job"),
]
SHELL_SLOW = [
    ("bulk.md", "batch=$(tokenmill bulk submit in.jsonl)"),
    ("quickstart.md", "tokenmill jobs"),
    ("quickstart.md", "tokenmill tail $job"),
]
SHELL = [*SHELL_FAST, *SHELL_SLOW]

# (page, the block's beginning or a line of it) → the test that runs it
ELSEWHERE = {
    (
        "bring-your-own-engine.md",
        "ops/test tests/",
    ): "test_the_suite_tries_a_named_engine",
    ("gateway.md", "tokenmill keys create acme"): "test_the_guide_of_the_gateway_runs",
    ("gateway.md", "curl localhost:8080"): "test_the_guide_of_the_gateway_runs",
    (
        "gateway.md",
        "upstream gateways {",
    ): "test_a_proxy_with_the_guide_s_lines_passes_streams_and_uploads",
    (
        "gateway.md",
        "api.example.com {",
    ): "test_a_proxy_with_the_guide_s_lines_passes_streams_and_uploads",
    ("quickstart.md", "curl localhost:8080"): "test_the_guide_of_the_gateway_runs",
    ("README.md", "curl localhost:8080"): "test_the_guide_of_the_gateway_runs",
    ("bulk.md", '{"custom_id": "a-1"'): "test_the_shell_commands_of_a_page_run",
    ("structured-output.md", '{"type": "structural_tag"'): "test_the_guide_s_tags_compile",
    ("structured-output.md", "tokenmill submit"): "test_the_guide_of_structured_output_runs",
    ("README.md", "TOKENMILL_DATABASE_URL"): "test_the_page_s_commands_write_an_empty_revision",
    ("README.md", "ops/demo "): "test_the_demonstration_shows_every_answer_results_and_usage",
    ("protocol.md", "de 00"): "test_example_bytes_decode_to_the_json_beside_them",
    ("protocol.md", "82 a4"): "test_example_bytes_decode_to_the_json_beside_them",
    ("protocol.md", '{"job_id"'): "test_example_bytes_decode_to_the_json_beside_them",
    ("protocol.md", '{"worker_id"'): "test_example_bytes_decode_to_the_json_beside_them",
    ("protocol.md", '{"type"'): "test_example_bytes_decode_to_the_json_beside_them",
}

# (page, the block's beginning or a line of it) → why no test runs it
NOT_RUN = {
    ("bring-your-own-engine.md", "run="): "needs an engine of the reader's",
    ("bring-your-own-engine.md", "tokenmill worker"): "needs an engine of the reader's",
    ("README.md", " your backend"): "a drawing",
    ("README.md", "schemas/tokenmill_schemas/job.py"): "a list of files, which house rules check",
    ("concepts.md", " submit        claim"): "a drawing",
    ("architecture.md", "  producers"): "a drawing",
    ("architecture.md", "             not_before"): "a drawing",
    ("architecture.md", " WAITING"): "a drawing",
    ("protocol.md", "read(id):"): "pseudocode; the examples below it are run",
    ("models.md", "Weights in memory"): "a log line that the worker prints",
    ("models.md", "tokenmill worker --model /models/small"): "needs two GPUs",
    ("models.md", "tokenmill worker --model /models/base"): "needs a model with its adapters",
    ("celery.md", "tokenmill tasks"): "runs until it is stopped; tests/tasks start it",
    ("celery.md", "celery -A tokenmill_worker.tasks call"): "needs a broker that stays",
    ("contributing.md", "ops/setup"): "what `.ci/run` runs",
    ("deployment.md", "docker compose --profile cpu up"): "needs Docker",
    ("deployment.md", "# back up"): "needs Docker; `ops/compose-check` runs it",
    ("deployment.md", "# restore"): "needs Docker; `ops/compose-check` runs it",
    ("deployment.md", "# change a password"): "needs Docker; `ops/compose-check` runs it",
    ("deployment.md", "python3 -m venv /opt/tokenmill"): "installs outside of the checkout",
    ("deployment.md", "tokenmill db upgrade"): "processes that run until they are stopped",
    ("deployment.md", 'psql "$OWNER_URL"'): "tests/gateway/test_rights.py runs the file",
    ("deployment.md", "masteruser replica"): "lines of redis.conf; tests/e2e/test_acl.py has them",
    ("deployment.md", "sentinel monitor main"): "lines of Sentinel's file; as above",
    ("performance.md", "ops/bench engine"): "takes an hour, and needs vLLM",
    ("vllm.md", "python3 -m venv /opt/vllm"): "installs outside of the checkout",
    ("vllm.md", "export TOKENMILL_ENGINE_ARG"): "needs eight GPUs; test_requests.py runs vLLM",
    ("quickstart.md", "ops/setup demo"): "downloads 3 GB; `dev` runs until it is stopped",
    ("quickstart.md", "python -m ops.examples.fastapi_app"): "a server; tests/examples start it",
    ("quickstart.md", "tokenmill dev --model"): "needs a model of the reader's",
}


def is_named(page: str, block: str, names: Iterable[tuple[str, str]]) -> bool:
    lines = block.splitlines()
    return any(
        page == where and any(line.startswith(start) for line in lines) for where, start in names
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_named(page: Path) -> None:
    languages = {"", "sh", "json", "python", "nginx", "caddyfile"}
    wrong = []
    for language, block in blocks(page):
        if language not in languages:
            wrong.append(f"unknown language {language}")
        elif language == "python":
            wrong += [] if page.name in PYTHON else ["no test runs this page's Python"]
        elif not is_named(page.name, block, [*SHELL, *ELSEWHERE, *NOT_RUN]):
            wrong.append(f"neither run nor named: {block.splitlines()[0]}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_fences(page: Path) -> None:
    """An indented block would be neither run nor kept from a formatter that wraps prose."""
    text = re.sub(r"^```(?:.*\n)*?```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.findall(r"^(?: {4}|\t)(?! *[-*\d]).*", text, re.MULTILINE) == []


def test_every_listed_block_and_test_exists() -> None:
    """A block that is gone leaves no name behind, and the tests named here exist."""
    found = [(page.name, block) for page in PAGES for _, block in blocks(page)]
    stale = [
        name
        for name in [*SHELL, *ELSEWHERE, *NOT_RUN]
        if not any(is_named(page, block, [name]) for page, block in found)
    ]
    assert stale == []
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = {
        name for names in (*PYTHON.values(), *ELSEWHERE.values()) for name in names.split(", ")
    }
    assert {name for name in tests if f"def {name}(" not in sources} == set()


def shell_block(page: str, start: str) -> str:
    path = ROOT / page if page == "README.md" else GUIDES / page
    (block,) = [text for _, text in blocks(path) if is_named(page, text, [(page, start)])]
    return block


@pytest.mark.redis
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("page", "start"),
    [*SHELL_FAST, *(pytest.param(*block, marks=pytest.mark.slow) for block in SHELL_SLOW)],
    ids=lambda text: re.sub(r"\W+", "-", text)[:40],
)
async def test_the_shell_commands_of_a_page_run(
    page: str, start: str, redis_url: str, tmp_path: Path
) -> None:
    """The lines of a block, one after the other in one shell, beside a worker without a model."""
    (lines,) = [text for _, text in blocks(GUIDES / "bulk.md") if text.startswith('{"custom_id"')]
    (tmp_path / "in.jsonl").write_text(lines.replace("smollm2-135m-instruct", QUEUE))
    database = database_url(tmp_path)
    block = shell_block(page, start).replace("my-model", QUEUE)
    async with running_worker(redis_url, database):
        done = await run_shell(block, tmp_path, redis_url, database)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
