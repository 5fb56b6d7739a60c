"""The engine used directly, with the calls of Transformers' continuous batching, from any thread.

Belongs here: the manager with its thread, and a model with `generate_batch`. What happens to a
request belongs to `requests`; the engine in a process of its own belongs to `process`.
"""
