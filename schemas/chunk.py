"""A piece of a job's answer, as it is logged and published."""

import msgspec

from schemas.generation import FinishReason, TokenLogprob
from schemas.result import JobError, JobStatus, Usage


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One or more consecutive tokens of one choice; a chunk per token while streaming.

    `index` is the number of tokens of this job (all choices together) before this chunk, so a reader
    that has seen `index + len(token_ids)` tokens needs exactly the chunk that starts there. `text` may
    be empty (half a character, or the possible beginning of a stop string is held back).
    The last chunk of a job has `status` set: it carries the usage, the error, and possibly no token.
    """

    job_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None  # of this choice
    attempt: int = 1
    status: JobStatus | None = None  # of the job: set on its last chunk only
    usage: Usage | None = None
    error: JobError | None = None
    text_ends: tuple[int, ...] = ()  # of several tokens: len(text) after each, so that a reader may begin between them
    place: int | None = None  # where there are several choices: tokens of this one before the chunk

    @property
    def end(self) -> int:
        """The index that the next chunk will have."""
        return self.index + len(self.token_ids)

    @property
    def is_last(self) -> bool:
        return self.status is not None
