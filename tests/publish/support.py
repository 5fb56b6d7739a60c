"""A log in memory that answers as the append script does, and jobs to publish into it."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tests.support.tokenizers import byte_level
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_schemas.job import JobRequest, RetryPolicy
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.input.served_model import ServedModel
from tokenmill_worker.jobs import AdmittedJob, AppendFailures, AppendReply, ChunkAppend, Delivery

MODEL = ServedModel(
    ("tiny",),
    max_model_len=4096,
    vocab_size=byte_level().vocab_size,
    eos_token_ids=frozenset({260}),
)
EOS = 260
CREATED_MS = 1_000_000


class Clock(ServerClock):
    """A clock moved by hand."""

    def __init__(self, ms: int = CREATED_MS + 500) -> None:
        self.ms = ms
        super().__init__(self._now, self._now)

    def _now(self) -> int:
        return self.ms * 1_000_000


def size_of(chunk: Chunk) -> int:
    return len(chunk.token_ids) or 1


@dataclass
class FakeLog:
    """Holds each job's chunks; faults are switched on by a test."""

    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    published: list[Chunk] = field(default_factory=list)
    calls: list[list[ChunkAppend]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    is_down: bool = False
    loses_replies: bool = False  # does the work, then the connection breaks

    def end(self, job_id: str) -> int:
        """The number of the log's last entry."""
        return sum(map(size_of, self.chunks.get(job_id, [])))

    async def append(self, items: list[ChunkAppend]) -> AppendFailures:
        self.calls.append(items)
        if self.is_down:
            raise RedisUnavailable("connection refused")
        replies = [self._append(item) for item in items]
        if self.loses_replies:
            raise RedisUnavailable("connection reset")
        return {
            place: reply for place, reply in enumerate(replies) if reply[0] is not AppendReply.OK
        }

    def _append(self, item: ChunkAppend) -> tuple[AppendReply, int]:
        chunk = item.chunk
        log, end = self.chunks.setdefault(chunk.job_id, []), self.end(chunk.job_id)
        assert chunk.token_ids or chunk.finish_reason is not None
        if chunk.job_id in self.lost:
            return AppendReply.LOST, end
        ends = list(accumulate(map(size_of, log)))
        if item.end in ends and log[ends.index(item.end)] == chunk:
            return AppendReply.DUPLICATE, end
        if item.start == 0:
            log.clear()
        elif item.end <= end:
            log.clear()
            return AppendReply.GAP, 0
        elif item.start != end:
            return AppendReply.GAP, end
        log.append(chunk)
        if not item.checkpoint:
            self.published.append(chunk)
        return AppendReply.CANCELLED if chunk.job_id in self.cancelled else AppendReply.OK, item.end

    def truncate(self, job_id: str, length: int) -> None:
        """Drop the log's tail, as a server that lost it."""
        del self.chunks[job_id][length:]

    def text(self, job_id: str, choice: int = 0) -> str:
        return "".join(
            chunk.text for chunk in self.chunks.get(job_id, []) if chunk.choice == choice
        )

    def token_ids(self, job_id: str, choice: int = 0) -> tuple[int, ...]:
        return tuple(
            t
            for chunk in self.chunks.get(job_id, [])
            if chunk.choice == choice
            for t in chunk.token_ids
        )


def delivery_of(request: JobRequest, log: tuple[Chunk, ...] = (), **fields) -> Delivery:
    values: dict[str, Any] = {
        "token": 1,
        "deliveries": 1,
        "crashes": 0,
        "outcome": "run",
        "created_ms": CREATED_MS,
        "started_ms": CREATED_MS + 200,
        "attempt": 1,
        "log_end": sum(map(size_of, log)),
    } | fields
    return Delivery(
        job_id=request.job_id, payload=encode(request), log=tuple(encode(c) for c in log), **values
    )


async def admit(
    job_id: str = "job",
    log: tuple[Chunk, ...] = (),
    stream: bool = True,
    retry: RetryPolicy | None = None,
    token: int = 1,
    **params,
) -> AdmittedJob:
    """A job with the prompt "hi" (two tokens of the byte-level tokenizer)."""
    request = JobRequest(
        job_id=job_id,
        prompt="hi",
        stream=stream,
        retry=retry or RetryPolicy(),
        params=SamplingParams(**params),
    )
    admitted = InputProcessor(byte_level(), MODEL, clock=Clock()).process(
        delivery_of(request, log, token=token)
    )
    assert isinstance(admitted, AdmittedJob), admitted
    return admitted


def event(
    text: str | bytes = "",
    job_id: str = "job",
    choice: int = 0,
    end: FinishReason | None = None,
    token: int = 1,
    **fields,
):
    """The bytes of `text` are the tokens; an answer that ends with EOS ends so: `end=STOP`. Of the
    delivery `token`.
    """
    ids = tuple(text.encode() if isinstance(text, str) else text)
    if end is FinishReason.STOP:
        ids = (*ids, EOS)
    return TokenEvent(
        request_id=f"{job_id}/{token}", choice=choice, token_ids=ids, finish_reason=end, **fields
    )


def logprobs(*values: float) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(value) for value in values)
