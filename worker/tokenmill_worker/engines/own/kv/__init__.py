"""The KV cache: bookkeeping in plain Python, and the device and host pools that hold the bytes.

Belongs here: blocks, prefixes, offload, and the sizes of the pools. When a sequence gets or loses
its blocks is decided in `scheduler`; how attention reads them belongs to `attention`.
"""
