"""Replaces a decoder's modules at load by packed and fused ones that compute the same."""

from tokenmill_worker.engine.cpu.fused.optimise import optimise
from tokenmill_worker.engine.cpu.fused.packing import Packing
from tokenmill_worker.engine.cpu.fused.replace import swap_modules
from tokenmill_worker.engine.cpu.fused.whole_pass import DirectForward, find_direct

__all__ = ["DirectForward", "Packing", "find_direct", "optimise", "swap_modules"]
