"""What a simulated queue serves, in which form its answers are told, and what is seen of it."""

from dataclasses import dataclass, field

from worker.publish.chunker import CHECKPOINT_TOKENS


@dataclass(frozen=True, slots=True)
class Cutting:
    """How answers become chunks; those of bulk are logged and not published. `is_urgent`: the jobs are interactive, and
    where their steps have piled up these go as one (worker.turns.in_turn)."""

    name: str
    tokens: int
    is_published: bool = True
    is_urgent: bool = False

    @property
    def first(self) -> int:
        """Tokens of an answer's first chunk: a stream begins with its first token."""
        return 1 if self.is_published else self.tokens


TOKENS = Cutting("token chunks", 1)  # stream: true
INTERACTIVE = Cutting("interactive", 1, is_urgent=True)  # the same, priority: interactive
EIGHTS = Cutting("chunks of 8", 8)  # chunk_tokens, with a chunk_wait_seconds in which they fill
CHECKPOINTS = Cutting("checkpoints", CHECKPOINT_TOKENS, is_published=False)  # stream: false
CUTTINGS = (TOKENS, INTERACTIVE, EIGHTS, CHECKPOINTS)


@dataclass(frozen=True, slots=True)
class Mix:
    """What the jobs are like. A sequence reads `context` tokens of keys and values per step on average."""

    name: str
    prompt_tokens: int
    context: int
    num_sequences: int = 256


@dataclass(slots=True)
class Observations:
    """Of all workers, from `since` on; seconds. Tokens count when they are logged."""

    since: float
    tokens: int = 0
    jobs: int = 0
    claims_s: list[float] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)
    beats_s: list[float] = field(default_factory=list)
