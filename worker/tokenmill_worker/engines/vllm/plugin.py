"""A plugin of vLLM's: gives it our grammars, and ends each of its processes with their parent.

vLLM calls `install` in each of its processes, before anything is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmill_worker.engines.vllm.bound_answer import EXTRA, BoundAnswer

# Set by the engine process: the plugin does nothing elsewhere, as under `vllm serve`. Its value is
# a folder where the core writes why it has refused a grammar, which vLLM does not pass on.
VARIABLE: Final = "TOKENMILL_VLLM_REFUSALS"
_CREATE: Final = "_create_grammar"  # the only private name of vLLM's that is used
_PR_SET_PDEATHSIG: Final = 1


def install() -> None:
    """Prepare one of vLLM's processes."""
    if VARIABLE not in os.environ:  # noqa: TID251 - vLLM passes nothing else on to its processes
        return
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it died before
            os._exit(3)
    manager = _manager()
    original = getattr(manager, _CREATE, None)
    if original is None or hasattr(original, "of_tokenmill"):
        return

    def create(self: Any, request: Any) -> Any:
        extra = request.sampling_params.extra_args or {}
        if EXTRA not in extra:
            return original(self, request)
        answer = msgspec.json.decode(extra[EXTRA], type=BoundAnswer)
        from tokenmill_worker.engines.vllm.grammars import matched  # only now vLLM can be imported

        try:
            return matched(self.vllm_config.model_config, request, answer)
        except Exception as error:
            _refusal(answer.key).write_text(str(error), "utf-8")
            raise

    create.of_tokenmill = True  # type: ignore[attr-defined]
    setattr(manager, _CREATE, create)


def is_installed() -> bool:
    return hasattr(getattr(_manager(), _CREATE, None), "of_tokenmill")


def refusal_of(key: str) -> str | None:
    """Return why the engine core has refused the grammar of a request, and forget it."""
    path = _refusal(key)
    try:
        words = path.read_text("utf-8")
    except OSError:
        return None
    path.unlink(missing_ok=True)
    return words


def _refusal(key: str) -> Path:
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return Path(os.environ[VARIABLE]) / name  # noqa: TID251


def _manager() -> Any:
    from vllm.v1.structured_output import StructuredOutputManager

    return StructuredOutputManager
