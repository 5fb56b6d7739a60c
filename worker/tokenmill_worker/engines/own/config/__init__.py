"""The engine's settings, their limits, and the layout of the KV cache that follows from them.

Belongs here: settings with their help and checks, and the layout of the KV cache that they lead to.
The worker's own settings belong to `tokenmill_worker.settings`; what passes between scheduler and
runner in each step belongs to `plan`.
"""

from tokenmill_worker.engines.own.config.engine_config import (
    AttentionName,
    EngineConfig,
    EngineConfigError,
    Quantization,
)

__all__ = ["AttentionName", "EngineConfig", "EngineConfigError", "Quantization"]
