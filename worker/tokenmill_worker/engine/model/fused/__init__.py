"""Replaces a decoder's modules at load by packed and fused ones that compute the same."""

from tokenmill_worker.engine.model.fused.direct import DirectForward, find_direct
from tokenmill_worker.engine.model.fused.optimise import optimise
from tokenmill_worker.engine.model.fused.packing import Packing
from tokenmill_worker.engine.model.fused.swap import swap_modules

__all__ = ["DirectForward", "Packing", "find_direct", "optimise", "swap_modules"]
