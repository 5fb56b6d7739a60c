"""The KV cache: bookkeeping in plain Python, and the pools and files that hold the bytes.

Belongs here: blocks, prefixes, offload, files of blocks, and the sizes of the pools. When a
sequence gets or loses its blocks is decided in `scheduler`; how attention reads them belongs to
`attention`.
"""
