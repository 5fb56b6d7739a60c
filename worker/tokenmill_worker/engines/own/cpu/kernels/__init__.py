"""Kernels in C++ with a plain C interface: sources, compilation and loading at first use.

They include no torch headers, so one build serves every version of torch. A module that calls a
kernel describes its arguments by a ctypes structure beside the call.

Belongs here: arithmetic and its threads. Modules of a model belong to `cpu.fused`.
"""
