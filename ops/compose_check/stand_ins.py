"""Builds stand-ins for the images that compose uses, where no registry of images is reached.

Each has what compose relies on: users, folders, the first start. They are named `tokenmill-check/…`
and never take the name of a real image. Debian's packages come through debootstrap, which needs
root; Python is the calling interpreter, so that wheels of this machine fit.
"""

import json
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

Runner = Callable[[Sequence[str]], str]
FOLDER = Path(__file__).parent / "stand_ins"
SUITE = "trixie"  # Valkey 8.1, PostgreSQL 17
NAMES = {name: f"tokenmill-check/{name}" for name in ("valkey", "postgres", "python")}
_UNUSED = ("site-packages", "test", "idlelib", "tkinter", "turtledemo", "__pycache__", "*.a")


def override() -> str:
    """Return a compose file, in JSON, that puts the stand-ins into the place of the real images."""
    build = {"build": {"args": {"PYTHON_IMAGE": NAMES["python"]}}}
    ours = dict.fromkeys(("migrate", "worker-cpu", "tasks", "exporter", "gateway", "keys"), build)
    image = {"image": NAMES["postgres"]}
    servers = {"redis": {"image": NAMES["valkey"]}, "postgres": image, "rights": image}
    return json.dumps({"services": {**ours, **servers}})


def build_stand_ins(run: Runner, wheels: Path | None) -> str:
    """Build every stand-in; pip finds the files of `wheels` there, beside its index."""
    with tempfile.TemporaryDirectory() as scratch:
        _build_debian(run, Path(scratch) / "debian")
        context = Path(scratch) / "context"
        _fill_context(context, wheels)
        for name, image in NAMES.items():
            run(["docker", "build", "--target", name, "-t", image, str(context)])
    return f"{', '.join(NAMES.values())} of Debian {SUITE}"


def _build_debian(run: Runner, folder: Path) -> None:
    image = "tokenmill-check/debian"
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode == 0:
        return
    packed = folder.with_suffix(".tar")
    run(["debootstrap", "--variant=minbase", SUITE, str(folder)])
    run(["tar", "-C", str(folder), "-cf", str(packed), "."])
    run(["docker", "import", str(packed), image])


def _fill_context(context: Path, wheels: Path | None) -> None:
    shutil.copytree(FOLDER, context)
    prefix, version = Path(sys.base_prefix), f"{sys.version_info.major}.{sys.version_info.minor}"
    unused = shutil.ignore_patterns(*_UNUSED)
    shutil.copytree(
        prefix / f"lib/python{version}", context / f"python/lib/python{version}", ignore=unused
    )
    for library in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy2(library, context / "python/lib")
    (context / "python/bin").mkdir()
    for name in ("python", "python3"):
        shutil.copy2(prefix / f"bin/python{version}", context / "python/bin" / name)
    (context / "wheels").mkdir()
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        shutil.copy2(wheel, context / "wheels")
    authorities = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    shutil.copy2(authorities, context / "authorities.crt")
