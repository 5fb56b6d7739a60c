"""The fuzzed functions: everything that reads bytes which another process wrote.

Each target has seeds. An input is either read or refused with the error that the target's
documentation names; any other exception is a finding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.fuzz.mutation import pack, unpack
from tests.fuzz.seeds import (
    admission_seeds,
    command_seeds,
    dead_seeds,
    hash_seeds,
    log_seeds,
    messages_of,
    reply_seeds,
    report_seeds,
)
from tests.publish.support import CREATED_MS, MODEL, Clock
from tests.support.tokenizers import byte_level
from tokenmill.errors import ConfigurationError, InvalidRequest, UnreadableRecord
from tokenmill.operations.queue import read_dead, read_status
from tokenmill.operations.records import FIELDS, read_depth, read_log, read_record
from tokenmill.operations.stream_position import StreamPosition
from tokenmill.operations.submit import build_request
from tokenmill.transport.connect import parse_url
from tokenmill_schemas import codec
from tokenmill_schemas.codec import DecodeError, encode
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.keys import Keys, queue_of
from tokenmill_worker.contract.messages import FrameError, read_command, read_report
from tokenmill_worker.contract.requests import GenerationRequest, RequestError
from tokenmill_worker.engines.own.requests import RequestValidator
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.input.log_reader import EndRules, LogCorrupt, replay
from tokenmill_worker.input.log_reader import read_log as read_worker_log
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob
from tokenmill_worker.queue.scripts import read_delivery
from tokenmill_worker.text.job_output import JobOutput


@dataclass(frozen=True, slots=True)
class Target:
    """`run` raises nothing but `documented`; `share` is its part of a run over all targets."""

    name: str
    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    documented: tuple[type[Exception], ...] = ()
    share: int = 4

    def try_one(self, data: bytes) -> bool:
        """Return True if the input was read, False if it was refused as documented."""
        try:
            self.run(data)
        except self.documented as error:
            words = str(error)
        else:
            return True
        assert words, "an error without a word"
        return False


def _parts(data: bytes) -> list[Any]:
    """Inputs with several parts are MessagePack arrays; what is none is one part."""
    try:
        parts = unpack(data)
    except Exception:  # the harness's own packing, not what is tested
        return [data]
    return parts if isinstance(parts, list) else [data]


def _bytes(parts: Iterable[Any]) -> list[bytes]:
    return [
        part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
        for part in parts
    ]


@dataclass(slots=True)
class _Processing:
    """The worker's input processor: nothing may raise or reach the safety net behind the checks."""

    processor: InputProcessor = field(
        default_factory=lambda: InputProcessor(byte_level(), MODEL, clock=Clock())
    )
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def __call__(self, data: bytes) -> None:
        parts = _parts(data)
        outcomes = ("run", "run", "run", "run", "cancelled", "expired", "dead")
        outcome: Any = (
            outcomes[parts[1] % len(outcomes)]
            if len(parts) > 1 and isinstance(parts[1], int)
            else "run"
        )
        payload, *log = _bytes([parts[0] if parts else b"", *parts[2:]])
        delivery = Delivery("job", 1, payload, 1, 0, outcome, tuple(log), CREATED_MS, CREATED_MS, 1)
        outcome = self.processor.process(delivery)
        if isinstance(outcome, FinishedJob):
            assert outcome.result.status.is_final
            error = outcome.result.error
            assert error is None or error.code != "internal_error", error
            encode(outcome.result), encode(outcome.final_chunk)
        elif isinstance(outcome, AdmittedJob):
            assert 0 < len(outcome.generation.prompt.token_ids) < MODEL.max_model_len
            # a request that was let in passes the engine's own door too
            RequestValidator(
                vocab_size=MODEL.vocab_size, max_model_len=MODEL.max_model_len
            ).validate(outcome.generation)


def _engine_door(data: bytes) -> None:
    request = msgspec.msgpack.decode(data, type=GenerationRequest)
    RequestValidator(vocab_size=1000, max_model_len=4096).validate(request)


def _log(data: bytes) -> None:
    params = SamplingParams(n=2, logprobs=True, stop=("END",), max_tokens=64)
    chunks = read_worker_log(_bytes(_parts(data)), byte_level().vocab_size)
    replay(JobOutput.start(byte_level(), params), chunks, EndRules.of(params, frozenset({260})))


def _cursor(data: bytes) -> None:
    """Feed a cursor in any order: no chunk is delivered twice, and the cursor only goes forward."""
    cursor, received = StreamPosition("job"), 0
    for part in _bytes(_parts(data)):
        try:
            chunk = codec.decode_chunk(part)
        except DecodeError:
            chunk = None
        said = list(cursor.accept(chunk) or ()) if chunk is not None else []
        if chunk is None:
            try:
                said = list(cursor.accept_result(codec.decode_result(part)))
            except DecodeError:
                said = []
        assert cursor.num_tokens >= received
        received = cursor.num_tokens
        assert all(encode(item) for item in said)


def _record(data: bytes) -> None:
    """A job's hash as HMGET returns it, the log beside it, and the queue's counters."""
    parts = _bytes(_parts(data))
    values = [*parts[: len(FIELDS)], *[None] * max(0, len(FIELDS) - len(parts))]
    log = read_log([(b"1-0", {b"chunk": part}) for part in parts[len(FIELDS) :]])
    record = read_record("job", values)
    if record is not None:
        encode(record.outcome(log))


def _meta(data: bytes) -> None:
    parts = _bytes(_parts(data))
    read_depth(dict(zip(parts[::2], parts[1::2], strict=False)))


def _dead(data: bytes) -> None:
    parts = _bytes(_parts(data))
    read_dead([(b"1-0", dict(zip(parts[::2], parts[1::2], strict=False)))])


def _status(data: bytes) -> None:
    """Read a worker's status. It never fails: a worker with an unreadable status still exists."""
    assert isinstance(read_status("w1", data), WorkerStatus)


def _delivery(data: bytes) -> None:
    """The claim script's reply: numbers are numbers (the script sees to it), every text may be
    anything.
    """
    texts = _bytes(_parts(data))
    job_id, payload, outcome, *log = [*texts, b"", b"", b""][: max(3, len(texts))]
    delivery = read_delivery(
        [job_id, b"3", payload, 1, 0, outcome, b"5", b"6", 1, 0, log, 0, len(log)]
    )
    assert delivery.job_id.encode("utf-8", "surrogateescape") == job_id


def _python_request(data: bytes) -> None:
    """Run the producer's side of the same checks with arguments of any kind."""
    (arguments, *_) = [*_parts(data), {}]
    if isinstance(arguments, dict):
        build_request({str(name): value for name, value in arguments.items()})


def _url(data: bytes) -> None:
    parse_url(data.decode("utf-8", "replace"))


def _keys(data: bytes) -> None:
    """Two different owners never share a key."""
    texts = [part.decode("utf-8", "replace") for part in _bytes(_parts(data))]
    first, second, third, fourth = [*texts, "", "", "", ""][:4]
    keys = Keys(queue_of(first))
    assert (keys.idempotency(first, second) == keys.idempotency(third, fourth)) == (
        (first, second) == (third, fourth)
    )
    names = {
        name: getattr(keys, name)(second)
        for name in ("job", "log", "chunks", "worker", "owned", "control")
    }
    assert (
        len({*names.values(), keys.meta, keys.dead, keys.workers, keys.wake_up}) == len(names) + 4
    )


_ARGUMENTS = {
    "prompt": "hi",
    "max_tokens": 4,
    "stop": ["x"],
    "logit_bias": {5: 1.0},
    "deadline": 60.0,
    "n": 2,
}
_URLS = (
    b"redis://user:pw@host:6379/0", b"redis+sentinel://:pw@a:1,b:2/main/0",
    b"rediss+cluster://[::1]:7,b", b"unix:///s",
)  # fmt: skip


def targets() -> dict[str, Target]:
    """Return new targets by name. Some hold an event loop, so they are not shared."""
    undecodable = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
    made = [
        Target("request", codec.decode_request, messages_of("request"), (DecodeError,)),
        Target("result", codec.decode_result, messages_of("result"), (DecodeError,)),
        Target("chunk", codec.decode_chunk, messages_of("chunk"), (DecodeError,)),
        Target(
            "order",
            codec.decode_control,
            messages_of("cancel") + messages_of("drain"),
            (DecodeError,),
            share=2,
        ),
        Target("worker-status", _status, messages_of("worker"), share=2),
        Target("engine-report", read_report, report_seeds(), (FrameError,)),
        Target("engine-command", read_command, command_seeds(), (FrameError,)),
        Target("engine-door", _engine_door, command_seeds(bare=True), (RequestError, *undecodable)),
        Target("admission", _Processing(), admission_seeds(), share=10),
        Target("log", _log, log_seeds(), (LogCorrupt,), share=6),
        Target("cursor", _cursor, log_seeds(with_result=True), share=4),
        Target("record", _record, hash_seeds(), (UnreadableRecord,)),
        Target(
            "meta",
            _meta,
            [pack([b"queued:bulk", b"5", b"running", b"1"])],
            (UnreadableRecord,),
            share=2,
        ),
        Target("dead", _dead, dead_seeds(), (UnreadableRecord,), share=2),
        Target("delivery", _delivery, reply_seeds(), share=2),
        Target("arguments", _python_request, [pack([_ARGUMENTS])], (InvalidRequest,), share=4),
        Target("url", _url, _URLS, (ConfigurationError,), share=2),
        Target("keys", _keys, [pack(["acme", "a:b", "acme:a", "b"])], share=2),
    ]
    return {target.name: target for target in made}
