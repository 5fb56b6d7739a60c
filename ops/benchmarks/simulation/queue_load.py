"""Load of a simulated queue: the mix of jobs, how answers become chunks, and what is observed."""

from dataclasses import dataclass, field

from tokenmill_worker.publish.chunker import CHECKPOINT_TOKENS


@dataclass(frozen=True, slots=True)
class Cutting:
    """Cutting of answers into chunks of `tokens` tokens.

    If not `is_published`, chunks are only logged, as those of bulk jobs. If `is_urgent`, the jobs
    are interactive, and steps that have piled up are appended as one
    (tokenmill_worker.publish.fair_batches.split_batches).
    """

    name: str
    tokens: int
    is_published: bool = True
    is_urgent: bool = False

    @property
    def first(self) -> int:
        """Number of tokens in an answer's first chunk; a stream begins with its first token."""
        return 1 if self.is_published else self.tokens


TOKENS = Cutting("token chunks", 1)  # stream: true
INTERACTIVE = Cutting("interactive", 1, is_urgent=True)  # stream: true, priority: interactive
EIGHTS = Cutting(
    "chunks of 8", 8
)  # chunk_tokens = 8, and a chunk_wait_seconds in which chunks fill
CHECKPOINTS = Cutting("checkpoints", CHECKPOINT_TOKENS, is_published=False)  # stream: false
CUTTINGS = (TOKENS, INTERACTIVE, EIGHTS, CHECKPOINTS)


@dataclass(frozen=True, slots=True)
class Mix:
    """Properties of the jobs.

    A sequence reads `context` tokens of keys and values per step on average.
    """

    name: str
    prompt_tokens: int
    context: int
    num_sequences: int = 256


@dataclass(slots=True)
class Observations:
    """Observations of all workers from `since` on, in seconds; tokens count when logged."""

    since: float
    tokens: int = 0
    jobs: int = 0
    claims_s: list[float] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)
    beats_s: list[float] = field(default_factory=list)
