"""Serves vLLM in place of our engine, by the calls of its AsyncLLM, in vLLM's own environment.

Token ids go in and come out; no text, no HTTP and no task per request lie between. The worker reads
`config`, which imports nothing of vLLM; everything else runs in the engine's process.
"""
