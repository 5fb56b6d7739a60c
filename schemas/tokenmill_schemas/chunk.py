"""A piece of a job's answer, as it is written to the log and published."""

import msgspec

from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_schemas.result import JobError, JobStatus, ScoredPrompt, ToolCallDelta, Usage


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One or more consecutive tokens of one choice. While streaming, each token has its own chunk.

    `index` is the number of tokens of this choice before this chunk, so a reader keeps one number
    per choice. `text` may be empty: the first bytes of a character, or the possible beginning of a
    stop string, are held back.

    The last chunk of a job has `status` set. It carries the usage and the error, and no token. With
    several choices, each choice first ends with a chunk of its own that has `finish_reason` set.
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
    text_ends: tuple[int, ...] = ()  # len(text) after each token; a reader may begin between them
    n: int = 1  # how many choices the job has
    reasoning: str = ""  # text of the model's thoughts
    reasoning_ends: tuple[int, ...] = ()  # len(reasoning) after each token, as text_ends
    tool_calls: tuple[ToolCallDelta, ...] = ()
    after: str = ""  # never sent: set by a reader of several choices; see `position`
    params: SamplingParams | None = None  # as in JobResult; in the log's first chunk only
    prompt: ScoredPrompt | None = None  # as in JobResult; in the first chunk of choice 0 only

    @property
    def end(self) -> int:
        """The index that the next chunk of this choice will have."""
        return self.index + len(self.token_ids)

    @property
    def position(self) -> str:
        """The position of a reader that has this chunk and all before it: pass it as
        `starting_after` to resume.
        """
        return self.after or str(self.end)

    @property
    def is_last(self) -> bool:
        return self.status is not None
