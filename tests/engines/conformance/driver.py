"""The worker's end of the protocol, for one engine process: bytes on a socket, and nothing else.

It knows the contract and no engine, so that it can try any command line.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.contract.messages import (
    Command,
    EngineFailed,
    Frame,
    Ready,
    Report,
    Start,
    Stop,
    Submit,
    read_report,
)
from tokenmill_worker.contract.requests import GenerationRequest, Prompt

PROMPT = tuple(range(100, 140))
_numbers = itertools.count()
_REQUEST = set(GenerationRequest.__struct_fields__)


def request(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> GenerationRequest:
    """A greedy request of eight tokens; fields are those of the request or of its parameters."""
    own = {name: fields.pop(name) for name in list(fields) if name in _REQUEST}
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields}
    return GenerationRequest(
        request_id=f"r{next(_numbers)}",
        prompt=Prompt(prompt),
        params=SamplingParams(**params),
        **own,
    )


@dataclass(slots=True)
class ReportedChoice:
    """The sum of the events of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None

    def add(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, f"an event follows the end: {event}"
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs += event.prompt_logprobs
        self.num_cached_tokens += event.num_cached_tokens
        self.finish_reason = event.finish_reason
        self.error, self.error_code = event.error, event.error_code


class EngineUnderTest:
    """One engine process. `command` is its command line without the socket's number."""

    def __init__(
        self,
        command: Sequence[str],
        start: Start | bytes,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)  # full after some frames
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )
        self._buffer = bytearray()
        self.answers: dict[tuple[str, int], ReportedChoice] = {}
        self.frames: list[Frame] = []
        self.failure: EngineFailed | None = None
        self.send_bytes(start if isinstance(start, bytes) else msgspec.msgpack.encode(start))

    def ready(self, timeout_s: float = 600) -> Ready:
        """Read reports until the engine is ready."""
        while True:
            report = self.report(timeout_s)
            if isinstance(report, Ready):
                return report
            assert type(report).__name__ in ("LoadProgress", "Logged"), report

    def send(self, command: Command) -> None:
        self.send_bytes(msgspec.msgpack.encode(command))

    def send_bytes(self, payload: bytes) -> None:
        self._socket.sendall(len(payload).to_bytes(4, "little") + payload)

    def submit(self, *requests: GenerationRequest) -> None:
        for request in requests:
            for choice in range(request.params.n):
                self.answers.pop((request.request_id, choice), None)
        self.send(Submit(requests))

    def report(self, timeout_s: float = 60) -> Report:
        """Read one report. Raises EOFError at the end, TimeoutError without one."""
        self._socket.settimeout(timeout_s)
        length = int.from_bytes(self._read(4), "little")
        report = read_report(self._read(length))
        if isinstance(report, EngineFailed):
            self.failure = report
        if isinstance(report, Frame):
            self.frames.append(report)
            for event in report.events:
                self.of((event.request_id, event.choice)).add(event)
        return report

    def of(self, key: tuple[str, int]) -> ReportedChoice:
        """Return what has been reported of a choice, by request id and index."""
        return self.answers.setdefault(key, ReportedChoice())

    def until(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
        """Read reports until a condition holds."""
        limit = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < limit, f"not within {timeout_s} s: {self.answers}"
            self.report()

    def answer(self, request: GenerationRequest, timeout_s: float = 120) -> list[ReportedChoice]:
        """Submit a request and return its choices when all have ended."""
        return self.answer_all([request], timeout_s)[0]

    def answer_all(
        self, requests: Sequence[GenerationRequest], timeout_s: float = 120
    ) -> list[list[ReportedChoice]]:
        self.submit(*requests)
        keys = [
            [
                (one.request_id, choice)
                for choice in range(max(1, one.params.n))
                if choice not in one.done
            ]
            for one in requests
        ]

        def has_ended(of: list[tuple[str, int]]) -> bool:
            found = [self.answers[key] for key in of if key in self.answers]
            refused = any(one.error_code == "invalid_request" for one in found)
            ends = sum(one.finish_reason is not None for one in found)
            return refused or ends == len(of)

        self.until(lambda: all(map(has_ended, keys)), timeout_s)
        return [[self.answers[key] for key in of if key in self.answers] for of in keys]

    def stop(self, timeout_s: float = 30) -> int:
        """Send Stop, read what is still reported, and return the exit status."""
        self.send(Stop())
        with contextlib.suppress(EOFError):
            self.until(lambda: False, timeout_s)
        return self.process.wait(timeout_s)

    def leave(self) -> None:
        """Close the socket, as the death of the worker does."""
        self._socket.close()

    def kill(self) -> None:
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._buffer += data
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data


def one(engine: EngineUnderTest, **fields: Any) -> ReportedChoice:
    (answer,) = engine.answer(request(**fields))
    return answer
