"""The engine's settings, their limits, and the layout of the KV cache that follows from them.

Belongs here: settings with their help and checks, the engine's abilities, and the layout of the KV
cache that the settings lead to. The worker's own settings belong to `tokenmill_worker.settings`;
what passes between scheduler and runner in each step belongs to `plan`.
"""

import dataclasses

from tokenmill_worker.contract.engine_kind import EngineConfigError, EngineKind
from tokenmill_worker.engines.own.config.capabilities import CAPABILITIES
from tokenmill_worker.engines.own.config.engine_config import (
    AttentionName,
    EngineConfig,
    Quantization,
)

KIND = EngineKind(
    config=EngineConfig,
    settings=tuple(
        field.name for field in dataclasses.fields(EngineConfig) if "help" in field.metadata
    ),
    capabilities=CAPABILITIES,
    packages=dict.fromkeys(
        (
            "torch", "transformers", "safetensors", "numpy", "xgrammar", "jsonschema_rs",
            "llguidance", "filelock", "tqdm",
        ),
        "'.[engine]' in tokenmill's folder",
    ),
)  # fmt: skip

__all__ = ["KIND", "AttentionName", "EngineConfig", "EngineConfigError", "Quantization"]
