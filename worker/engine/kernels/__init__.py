"""Kernels in C++ with a plain C interface: their sources, and how they are compiled and loaded at first use.

No torch headers, so that one build serves every version of torch. Who calls a kernel describes its
arguments by a ctypes structure beside the call.
"""
