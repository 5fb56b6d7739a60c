"""Leaf modules of a decoder, swapped at load for packed and fused ones that give the same numbers."""

from worker.engine.model.fused.direct import DirectForward, find_direct
from worker.engine.model.fused.optimise import optimise
from worker.engine.model.fused.packing import Packing
from worker.engine.model.fused.swap import swap_modules

__all__ = ["DirectForward", "Packing", "find_direct", "optimise", "swap_modules"]
