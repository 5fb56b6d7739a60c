"""Kernels in C++ with a plain C interface: their sources, and how they are compiled and loaded at
first use.

They include no torch headers, so one build serves every version of torch. A module that calls a
kernel describes its arguments by a ctypes structure beside the call.
"""
