"""Paged attention: the contract of the backends, the reference, and the choice by name.

Belongs here: what all backends share. Backends for one device belong to `cpu` and `cuda`.
"""

from tokenmill_worker.engines.own.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    CommonPrefix,
    KVScales,
)
from tokenmill_worker.engines.own.attention.registry import (
    backend_class,
    backend_names,
    choose,
    serving_backend,
    why_not,
)
from tokenmill_worker.engines.own.config import AttentionName

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionName",
    "AttentionShape",
    "CommonPrefix",
    "KVScales",
    "backend_class",
    "backend_names",
    "choose",
    "serving_backend",
    "why_not",
]
