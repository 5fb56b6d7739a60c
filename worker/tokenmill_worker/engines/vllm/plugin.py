"""A plugin of vLLM's: gives it our grammars, ends each of its processes with their parent, and
passes on what vLLM does not: why a grammar was refused, and of what an engine core has died.

vLLM calls `install` in each of its processes, before anything is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.contract.requests import Thoughts
from tokenmill_worker.engines.own.errors import why
from tokenmill_worker.system.parent_death import end_with

# Set by the engine process: the plugin does nothing elsewhere, as under `vllm serve`. Its value is
# a folder of notes for the engine process.
VARIABLE: Final = "TOKENMILL_VLLM_NOTES"
EXTRA: Final = "tokenmill"  # name in the `extra_args` of a request
ERROR: Final = "error"  # key of the note on the last error in another process
BURST_S: Final = 10.0  # an error that follows another within this time is its consequence


class BoundAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds what binds one answer, as it travels to the engine core."""

    response_format: ResponseFormat | None = None
    thoughts: Thoughts | None = None
    num_resumed: int = 0  # tokens at the end of the prompt that are part of the answer
    tenant: str = ""  # whose turn a compilation takes
    key: str = ""  # the request, as the adapter names it


def install() -> None:
    """Prepare one of vLLM's processes."""
    if VARIABLE not in os.environ:  # noqa: TID251 - vLLM passes nothing else on to its processes
        return
    from vllm.v1.structured_output import StructuredOutputManager as Manager

    if hasattr(Manager, "of_tokenmill"):
        return
    if parent := multiprocessing.parent_process():
        end_with(parent.pid)
        logging.getLogger("vllm").addHandler(_ErrorNotes(logging.ERROR))

    begin, _ = Manager.__init__, Manager._create_grammar  # the one private name

    def begun(self: Any, config: Any) -> None:
        # only now vLLM can be imported
        from tokenmill_worker.engines.vllm.grammars import CoreGrammars

        begin(self, config)
        self.of_tokenmill = CoreGrammars(config.model_config)

    def create(self: Any, request: Any) -> Any:
        answer = msgspec.json.decode(request.sampling_params.extra_args[EXTRA], type=BoundAnswer)
        try:
            return self.of_tokenmill.matched(request, *msgspec.structs.astuple(answer)[:4])
        except Exception as error:
            _note(answer.key).write_text(str(error), "utf-8")
            raise

    Manager.__init__, Manager._create_grammar, Manager.of_tokenmill = begun, create, None


class _ErrorNotes(logging.Handler):
    """Notes the first of errors that follow each other: the others are its consequences."""

    def emit(self, record: logging.LogRecord) -> None:
        note, error = _note(ERROR), record.exc_info[1] if record.exc_info else None
        with contextlib.suppress(OSError):  # the engine process has ended
            if not note.exists() or record.created - note.stat().st_mtime > BURST_S:
                note.write_text(why(error) if error else record.getMessage(), "utf-8")


def taken_note(key: str, newer_than_s: float = float("inf")) -> str:
    """Return what another process has noted under a key, and forget it; nothing if it is older."""
    path = _note(key)
    with contextlib.suppress(OSError):
        age_s, words = time.time() - path.stat().st_mtime, path.read_text("utf-8")
        path.unlink()
        return words if age_s <= newer_than_s else ""
    return ""


def _note(key: str) -> Path:
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return Path(os.environ[VARIABLE]) / name  # noqa: TID251
