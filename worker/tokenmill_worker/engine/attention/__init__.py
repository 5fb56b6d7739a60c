"""Paged attention: the backends' contract (base), the backends, and the choice among them (registry)."""

from tokenmill_worker.engine.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
)
from tokenmill_worker.engine.attention.registry import backend_class, backend_names, choose, why_not
from tokenmill_worker.engine.config import AttentionName

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionName",
    "AttentionShape",
    "backend_class",
    "backend_names",
    "choose",
    "why_not",
]
