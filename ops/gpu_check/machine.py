"""The machine stage: what can be imported, in which version, and what the device is."""

import argparse
import importlib
import platform
import sys
import time

import psutil

NEEDED = (
    "torch",
    "transformers",
    "triton",
    "msgspec",
    "pytest",
    "rich",
    "tokenmill_worker.engines.own",
)
USEFUL = (
    "xgrammar",
    "llguidance",
    "jsonschema_rs",
    "peft",
    "xdist",
    "pytest_timeout",
    "flash_attn.cute",
    "flash_attn",
)


def version(name: str) -> str:
    """Return a module's version, or why it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything
        return f"MISSING ({type(error).__name__}: {error})"[:60]
    return str(getattr(module, "__version__", "there"))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    started = time.perf_counter()
    found = {name: version(name) for name in (*NEEDED, *USEFUL)}
    for name, said in found.items():
        print(name, said)
    memory = psutil.virtual_memory().total / 2**30
    print(f"| Python {platform.python_version()}, {psutil.cpu_count()} CPUs, {memory:.0f} GiB")
    here = [f"{name} {said}" for name, said in found.items() if "MISSING" not in said]
    print(f"| {', '.join(here)}; imported in {time.perf_counter() - started:.0f} s")
    if absent := [f"{name} {said}" for name, said in found.items() if "MISSING" in said]:
        print(f"| {'; '.join(absent)}")
    if options.device == "cuda":
        _describe_device()
    return int(any("MISSING" in found[name] for name in NEEDED))


def _describe_device() -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    print(
        f"| {properties.name}, {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, CUDA {torch.version.cuda}"
    )


if __name__ == "__main__":
    sys.exit(main())
