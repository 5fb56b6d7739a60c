"""Keeps the record of a run of `ops/bench gpu`, and what its limit leaves time for."""

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich.console import Console

from ops.benchmarks.gpu.ceilings import measure_ceilings


class Session:
    """Keeps the growing record of a run and its deadline."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self._console = options, console
        self.until = time.monotonic() + options.limit
        self._keep = options.keep
        self.dtype = getattr(torch, options.dtype)
        self.ceilings = measure_ceilings(torch.device(options.device), self.dtype)
        self.record: dict[str, Any] = {
            "ok": True, "device": _describe_device(options.device),
            "ceilings": asdict(self.ceilings), "results": {}, "left_out": {},
        }  # fmt: skip
        self._keep(self.record)
        self.tell("ceilings", self.record["ceilings"])

    def attempt(self, shape: str, what: str, work: Callable[[], Any]) -> None:
        """Run one measurement and keep its result.

        The record says what failed, and what too little time was left for.
        """
        left_out, name = self.record["left_out"], f"{shape}: {what}"
        if time.monotonic() > self.until:
            left_out[name] = "no time was left"
            return
        started = time.perf_counter()
        try:
            found = work()
        except Exception as error:
            self.record["ok"] = False
            left_out[name] = f"{type(error).__name__}: {error}"
            self._console.print(traceback.format_exc(), markup=False, highlight=False)
        else:
            if found is not None:
                self.record["results"].setdefault(shape, {})[what] = found
                self.tell(f"{name} ({time.perf_counter() - started:.1f} s)", found)
        finally:
            self._keep(self.record)

    def tell(self, what: str, found: Any) -> None:
        if isinstance(found, dict):
            plain = {k: v for k, v in found.items() if not isinstance(v, list | dict)}
            each = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in plain.values())
            found = ", ".join(map(" ".join, zip(plain, each, strict=True)))
        self._console.print(f"{what}: {found}", markup=False, highlight=False, soft_wrap=True)


def _describe_device(device: str) -> dict[str, Any]:
    """Return the device's properties and the versions of torch and transformers."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if not device.startswith("cuda"):
        return {**versions, "name": device}
    properties = torch.cuda.get_device_properties(device)
    memory_gib = properties.total_memory / 2**30
    return {**versions, "name": properties.name, "memory_gib": memory_gib}
