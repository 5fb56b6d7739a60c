"""Leaf modules of a decoder, swapped at load for packed and fused ones that give the same numbers."""

from worker.engine.model.fused.swap import swap_modules

__all__ = ["swap_modules"]
