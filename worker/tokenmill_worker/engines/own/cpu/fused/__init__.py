"""Replaces a decoder's modules at load by packed and fused ones that compute the same.

Belongs here: CPU replacements and their choice. The kernels themselves belong to `cpu.kernels`, the
module walk to `model.replacement`.
"""

from tokenmill_worker.engines.own.cpu.fused.packing import Packing
from tokenmill_worker.engines.own.cpu.fused.prepare_weights import prepare_weights
from tokenmill_worker.engines.own.cpu.fused.replace import replace_modules
from tokenmill_worker.engines.own.cpu.fused.whole_pass import WholePass, find_whole_pass

__all__ = ["WholePass", "Packing", "find_whole_pass", "prepare_weights", "replace_modules"]
