"""Asks the checking process whether an answer keeps its schema.

The process starts with the first answer that has a schema. If it ends (an answer took too long, or
memory was short), that answer's check fails, and the next check starts a new process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Final

import msgspec

log = logging.getLogger(__name__)

VIOLATION: Final = "schema_violation"
_CHILD = Path(__file__).with_name("child.py")


class AnswerChecker:
    """Runs the checking process of one worker."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()

    async def violation(self, schema: dict[str, object], text: str) -> str | None:
        """Return a short description of how the answer breaks its schema; None if it does not."""
        async with self._asking:
            process = self._process
            try:
                request = msgspec.msgpack.encode((json.dumps(schema).encode(), text))
                if process is None or process.returncode is not None:
                    process = self._process = await self._start()
                return await _ask(process, request)
            except (OSError, asyncio.IncompleteReadError):
                self._kill()
                return "it could not be checked: the check took too long, or needed too much memory"
            except Exception as error:  # of any kind: the job must end
                log.exception(
                    "An answer could not be validated; its job ends with schema_violation"
                )
                self._kill()
                return f"it could not be checked: {type(error).__name__}"
            except BaseException:  # interrupted between request and reply: the pipe is out of step
                self._kill()
                raise

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(_CHILD), stdin=pipe, stdout=pipe,
            start_new_session=True,  # Ctrl-C reaches only the worker, which closes this stdin
        )  # fmt: skip


async def _ask(process: asyncio.subprocess.Process, request: bytes) -> str | None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(request).to_bytes(4, "big") + request)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(4), "big")
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=str | None)
