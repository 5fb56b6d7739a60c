"""The engine by itself: token ids in, token ids out, without queue, text or database.

`BatchedModel` has the calls of Transformers' continuous batching, for any thread. `Engine` is what
it steps; a caller that steps it itself uses one thread.

model = BatchedModel.from_pretrained("smollm2-135m-instruct", num_blocks=2048)
outputs = model.generate_batch(inputs=[[1, 2, 3]])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams, TokenLogprob
from tokenmill_worker.contract.events import Capacity, EngineStats, TokenEvent
from tokenmill_worker.contract.requests import GenerationRequest, RequestError
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.direct.results import RequestOutput, RequestStatus
from tokenmill_worker.engines.own.errors import EngineError
from tokenmill_worker.engines.own.types import SchedulingPolicy

if TYPE_CHECKING:
    from tokenmill_worker.engines.own.direct.batched_model import BatchedModel
    from tokenmill_worker.engines.own.direct.batching_config import ContinuousBatchingConfig
    from tokenmill_worker.engines.own.direct.manager import ContinuousBatchingManager
    from tokenmill_worker.engines.own.engine import Engine

__all__ = [
    "BatchedModel",
    "Capacity",
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "Engine",
    "EngineConfig",
    "EngineConfigError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "GenerationRequest",
    "RequestError",
    "RequestOutput",
    "RequestStatus",
    "ResponseFormat",
    "SamplingParams",
    "SchedulingPolicy",
    "TokenEvent",
    "TokenLogprob",
]


_HOMES = {
    "BatchedModel": "direct.batched_model",
    "ContinuousBatchingConfig": "direct.batching_config",
    "ContinuousBatchingManager": "direct.manager",
    "Engine": "engine",
}


def __getattr__(name: str) -> Any:
    """Import the heavy classes, and what they need, only when they are first used."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
