"""The engine by itself: token ids in, token ids out, without queue, text or database.

engine = Engine.load(EngineConfig(model="smollm2-135m-instruct", num_blocks=2048))
outputs = engine.generate_batch([[1, 2, 3]], [SamplingParams(max_tokens=8, temperature=0)])
"""

from typing import TYPE_CHECKING, Any

from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams, TokenLogprob
from tokenmill_worker.engine.config import EngineConfig, EngineConfigError
from tokenmill_worker.engine.types import (
    Capacity,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    RequestError,
    SchedulingPolicy,
    TokenEvent,
)

if TYPE_CHECKING:
    from tokenmill_worker.engine.engine import Engine
    from tokenmill_worker.engine.errors import EngineError

__all__ = [
    "Capacity",
    "Engine",
    "EngineConfig",
    "EngineConfigError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "GenerationOutput",
    "GenerationRequest",
    "RequestError",
    "ResponseFormat",
    "SamplingParams",
    "SchedulingPolicy",
    "TokenEvent",
    "TokenLogprob",
]


def __getattr__(name: str) -> Any:
    """Import Engine and EngineError, and torch with them, only when they are first used."""
    if name in ("Engine", "EngineError"):
        from tokenmill_worker.engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
