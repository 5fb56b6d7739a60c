"""The engine by itself: token ids in, token ids out, without queue, text or database.

engine = Engine.load(EngineConfig(model="smollm2-135m-instruct", num_blocks=2048))
outputs = engine.generate_batch([[1, 2, 3]], [SamplingParams(max_tokens=8, temperature=0)])
"""

from typing import TYPE_CHECKING, Any

from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams, TokenLogprob
from tokenmill_worker.engine.config import EngineConfig, EngineConfigError
from tokenmill_worker.engine.errors import EngineError
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
    """Import Engine, and what it needs, only when it is first used."""
    if name == "Engine":
        from tokenmill_worker.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
