"""Builds the fuzzer's seeds: good messages of every kind, as the product writes them."""

from __future__ import annotations

import msgspec

from tests.fuzz.mutation import pack
from tests.publish.support import CREATED_MS
from tests.schemas.samples import LOGPROBS, RESULT, SAMPLES, USAGE
from tokenmill.operations.records import FIELDS
from tokenmill_schemas.chat import Message
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.contract.events import Capacity, EngineStats, TokenEvent
from tokenmill_worker.contract.messages import (
    CancelRequest,
    Command,
    EngineFailed,
    Frame,
    LoadProgress,
    Ready,
    Report,
    Stop,
    Submit,
)
from tokenmill_worker.contract.requests import GenerationRequest, Prompt


def messages_of(prefix: str) -> list[bytes]:
    """Return the samples whose names begin with the prefix."""
    return [encode(value) for name, (value, _) in SAMPLES.items() if name.startswith(prefix)]


_CAPACITY = Capacity(
    free_sequences=3, free_blocks=9, waiting=1, running=2, block_size=16, max_model_len=4096
)
_REQUEST = GenerationRequest(
    request_id="job", prompt=Prompt((1, 2, 3)), params=SamplingParams(max_tokens=9, n=2, seed=1),
    priority=0, tenant="a",
    cache_salt="a", deadline=4e9, resumed=((4, 5), ()), done=(1,),
)  # fmt: skip
_EVENT = TokenEvent(
    request_id="job", choice=1, token_ids=(4, 5), logprobs=LOGPROBS,
    finish_reason=FinishReason.STOP,
    num_cached_tokens=2, preemptions=1, error="no", error_code="engine_error",
)  # fmt: skip


def command_seeds(*, bare: bool = False) -> list[bytes]:
    """Frames to the engine process; `bare`: the request alone."""
    if bare:
        return [encode(_REQUEST), encode(msgspec.structs.replace(_REQUEST, resumed=(), done=()))]
    commands: list[Command] = [
        Submit((_REQUEST,)),
        CancelRequest("job", FinishReason.CANCELLED, 1),
        Stop(),
    ]
    return [encode(command) for command in commands]


def report_seeds() -> list[bytes]:
    """Frames from the engine process."""
    ready = Ready(
        model="m",
        max_model_len=4096,
        max_num_seqs=64,
        vocab_size=1000,
        eos_token_ids=(2,),
        model_path="/m",
        description="d",
        capacity=_CAPACITY,
    )
    frame = Frame(events=(_EVENT,), capacity=_CAPACITY, stats=EngineStats(steps=4, busy_s=0.5))
    reports: list[Report] = [
        ready,
        frame,
        EngineFailed("lost", at_start=True),
        LoadProgress("loading", 0.5),
    ]
    return [encode(report) for report in reports]


def admission_seeds() -> list[bytes]:
    """[request, outcome, log…]: fresh, resumed, and ended ones."""
    base = JobRequest(
        job_id="job", messages=(Message("user", "Why?"),), metadata={"a": "b"},
        deadline_ms=CREATED_MS * 2,
        params=SamplingParams(max_tokens=9, stop=("x",), logit_bias={3: 1.0}, n=2, seed=1,
            temperature=0.5),
    )  # fmt: skip
    probed = msgspec.structs.replace(
        base,
        messages=None,
        prompt="hi",
        params=SamplingParams(max_tokens=20, logprobs=2, stop=("END",)),
    )
    chunks = [
        Chunk(
            job_id="job", index=0, token_ids=(72, 105), text="Hi", logprobs=LOGPROBS, usage=USAGE
        ),
        Chunk(job_id="job", index=2, token_ids=(33,), text="!", logprobs=(TokenLogprob(-1.0),)),
    ]
    log = [encode(chunk) for chunk in chunks]
    ids = msgspec.structs.replace(base, messages=None, prompt_ids=(1, 2, 3))
    return [
        *(pack([encode(request), 0]) for request in (base, probed, ids)),
        pack([encode(probed), 0, *log]),
        pack([encode(probed), 5, *log]),
        pack([encode(base), 4]),
    ]


def log_seeds(*, with_result: bool = False) -> list[bytes]:
    """Chunks of two choices with an end; the result instead of the rest."""
    chunks = [
        Chunk(job_id="job", index=0, token_ids=(72,), text="H", logprobs=LOGPROBS[:1], usage=USAGE),
        Chunk(job_id="job", index=0, token_ids=(105, 33), text="i!", choice=1, logprobs=LOGPROBS),
        Chunk(job_id="job", index=1, choice=0, text="?", finish_reason=FinishReason.STOP),
        Chunk(job_id="job", index=2, token_ids=(69,), text="", choice=1, logprobs=LOGPROBS[:1]),
    ]
    log = [encode(chunk) for chunk in chunks]
    return (
        [pack(log), pack([log[0], encode(RESULT)]), pack(log[::-1])]
        if with_result
        else [pack(log), pack(log[:2])]
    )


def hash_seeds() -> list[bytes]:
    """Return a job's fields in the order of HMGET, then its log."""
    values = {
        "state": b"running",
        "class": b"bulk",
        "created_ms": b"5",
        "attempt": b"2",
        "error": b"e",
    }
    running = [values.get(name, b"") for name in FIELDS]
    ended = values | {
        "state": b"succeeded",
        "settled": b"1",
        "result": encode(RESULT),
        "error_code": b"x",
    }
    return [
        pack([*running, encode(Chunk(job_id="job", index=0, token_ids=(1,), text="a"))]),
        pack([ended.get(name, b"7") for name in FIELDS]),
    ]


def dead_seeds() -> list[bytes]:
    return [
        pack([b"job", b"j", b"error", b"e", b"history", b"1 crash\n2 crash", b"died_ms", b"17"])
    ]


def reply_seeds() -> list[bytes]:
    return [pack([b"job", messages_of("request")[0], b"run", messages_of("chunk")[0]])]
