"""vLLM's environment. The tests that need it run where the variable VLLM_PYTHON names its Python,
or where it is in the guide's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VLLM = Path(os.environ.get("VLLM_PYTHON", "/opt/vllm/bin/python"))  # noqa: TID251
ARGUMENTS = "enforce-eager=true gpu-memory-utilization=0.15"

needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason=f"there is no {VLLM}")


def with_vllm(environment: Mapping[str, str], *plugins: str) -> dict[str, str]:
    """Return an environment in which vLLM's Python finds this tree and loads its plugin, as with an
    installed tokenmill. `plugins` are further ones: the functions, as MODULE:NAME.
    """
    folders = [ROOT / "worker", ROOT / "schemas", _named(*plugins)]
    if plugins:
        folders.append(ROOT)  # theirs are modules of tests
    path = ":".join(map(str, folders))
    return {**environment, "PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1"}


def _named(*plugins: str) -> Path:
    """Return a folder that names plugins to vLLM."""
    ours = "tokenmill_worker.engines.vllm.plugin:install"
    folder = ROOT / ".cache" / ("vllm-plugins" if plugins else "vllm-plugin")
    info = folder / "tokenmill_plugin-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenmill-plugin\nVersion: 0\n")
    lines = [f"p{number} = {name}\n" for number, name in enumerate((ours, *plugins))]
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "".join(lines))
    return folder
