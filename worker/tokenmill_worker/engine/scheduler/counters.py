"""Running counters of the scheduler; `EngineStats` combines a snapshot of them with gauges."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Counters with the names that they have in EngineStats."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    soft_resets: int = 0
    recomputed_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0

    def as_dict(self) -> dict[str, int]:
        return {
            name: getattr(self, name) for name in _NAMES
        }  # asdict copies deeply: too slow for every step


_NAMES = tuple(field.name for field in fields(Counters))
