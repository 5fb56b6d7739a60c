"""A real headless Chromium for tests of pages: the binary is inside a package of
ops/examples/package.json, so that no browser has to be on the machine and none is fetched; its own
libraries come with it.

`ops/setup dev` installs the package. It knows nothing of what is looked at.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser, async_playwright

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "ops" / "examples"
UNPACKED = ROOT / ".cache" / "chromium"
# The package brings libraries along for machines that lack them; it unpacks them where it thinks it
# is on such a one.
_UNPACK = 'import chromium from "@sparticuz/chromium"; await chromium.executablePath();'
_WITH_LIBRARIES = {"AWS_EXECUTION_ENV": "AWS_Lambda_nodejs22.x"}


class NodeUnavailable(RuntimeError):
    """Node, its packages or Chromium is missing; the message names the command that installs it."""


def node() -> str:
    """Return the Node that ops/setup uses: the environment's own, or the machine's."""
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # noqa: TID251
    found = shutil.which("node", path=path)
    if found is None or not (EXAMPLES / "node_modules").is_dir():
        raise NodeUnavailable("Node or ops/examples/node_modules is missing: run ops/setup dev")
    return found


def chromium_folder() -> Path:
    """Unpacked once per version of the package; several test runs at once are safe."""
    package = EXAMPLES / "node_modules" / "@sparticuz" / "chromium" / "package.json"
    if not package.is_file():
        raise NodeUnavailable("the package with Chromium is missing: run ops/setup dev")
    folder = UNPACKED / f"{package.stat().st_mtime_ns}"
    if not folder.is_dir():
        UNPACKED.mkdir(parents=True, exist_ok=True)
        fresh = tempfile.mkdtemp(dir=UNPACKED)
        environment = os.environ | _WITH_LIBRARIES | {"TMPDIR": fresh}  # noqa: TID251
        command = [node(), "--input-type=module", "-e", _UNPACK]
        subprocess.run(command, cwd=EXAMPLES, env=environment, check=True, timeout=300)
        try:
            Path(fresh).rename(folder)
        except OSError:  # another run was quicker
            shutil.rmtree(fresh)
    return folder


@asynccontextmanager
async def open_browser(folder: Path) -> AsyncIterator[Browser]:
    libraries = str(folder / "al2023" / "lib")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=folder / "chromium",
            # test machines run as root, with a small /dev/shm
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},  # noqa: TID251
        )
        try:
            yield browser
        finally:
            await browser.close()
