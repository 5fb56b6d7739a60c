"""A piece of a job's answer, as it is logged and published."""

import msgspec

from schemas.generation import FinishReason, TokenLogprob
from schemas.result import JobError, JobStatus, Usage


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One or more consecutive tokens of one choice; a chunk per token while streaming.

    `index` is the number of tokens of this choice before this chunk, so a reader keeps one number per choice.
    `text` may be empty (half a character, or the possible beginning of a stop string is held back).
    The last chunk of a job has `status` set: it carries the usage, the error, and no token. With several choices each
    tells its own end before it, in a chunk with `finish_reason`.
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
    place: int | None = None  # read only, from workers before `n`: what `index` is now (theirs counted all choices)
    n: int = 1  # how many choices the job has
    after: str = ""  # never sent: set by a reader of several choices; see `position`

    @property
    def end(self) -> int:
        """The index that the next chunk of this choice will have."""
        return self.index + len(self.token_ids)

    @property
    def position(self) -> str:
        """Where a reader stands that has this chunk and those before it: the `starting_after` to go on from."""
        return self.after or str(self.end)

    @property
    def is_last(self) -> bool:
        return self.status is not None
