"""Replaces a decoder's modules at load by packed and fused ones that compute the same."""

from tokenmill_worker.engine.cpu.fused.packing import Packing
from tokenmill_worker.engine.cpu.fused.prepare_weights import prepare_weights
from tokenmill_worker.engine.cpu.fused.replace import replace_modules
from tokenmill_worker.engine.cpu.fused.whole_pass import WholePass, find_whole_pass

__all__ = ["WholePass", "Packing", "find_whole_pass", "prepare_weights", "replace_modules"]
